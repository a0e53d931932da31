"""``benchmarks.live.predict`` on a virtual machine: what was recorded is predicted, and what changed within is not."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.live import late
from benchmarks.live import predict as live_predict
from benchmarks.live.plan import Targets, Window
from benchmarks.live.predict import ERROR_OF, by_kind, holds, predict, print_prediction
from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel, Prediction
from neaptide.engine.observer import EngineObserver
from neaptide.engine.record.step_log import create_log
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import ConstantCostModel, Regime
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.recipes import build_headroom, recipe_of
from neaptide.executors.simulated.trace_executor import TraceExecutor
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.simulation.driven_runs import DrivenLoad, DrivenStep, Outcome, drive

NUM_BLOCKS = 1024
TARGETS = Targets(0.5, 0.06)
BEGIN_S, END_S = 3.0, 9.0
"""Of the window, from when the batch came."""
AT_S = 1000.0
"""When that was."""
COST = StepCost(fixed_s=0.02, gemm_curve_s=(1e-3, 2e-3), pair_s=1e-7, kv_token_s=1e-6)
BASE = RooflineModel(dict.fromkeys(Regime, COST))


class Machine:
    """Implements ``CostModel``: a tenth slower than its profile, and more so from a moment on."""

    def __init__(self, clock: VirtualClock, then_s: float, factor: float) -> None:
        self._clock, self._then_s, self._factor = clock, then_s, factor

    def predict(self, shape: BatchShape) -> Prediction:
        factor = self._factor if self._clock.now() >= self._then_s else 1.0
        return Prediction(1.1 * factor * BASE.predict(shape).seconds, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


class Planning(EngineObserver):
    """Takes 5 ms of the host."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def planning(self, now_s: float) -> None:
        self._clock.sleep_until(self._clock.now() + 0.005)


def recorded(directory: Path, log: Path, then_s: float, factor: float, *, overlap_depth: int = 0) -> Window:
    """A run on that machine, as ``benchmarks.live.run`` would have measured it; one step ahead, planning takes time."""
    clock = VirtualClock(AT_S)
    load = DrivenLoad.make(2.0, END_S, 1500, (TARGETS.ttft_s, TARGETS.tpot_s), 1000, directory)
    scheduler = SchedulerConfig(
        max_model_len=1024, ttft_slo_s=TARGETS.ttft_s, tpot_slo_s=TARGETS.tpot_s, overlap_depth=overlap_depth
    )
    config, model = EngineConfig(cache=CacheConfig(), scheduler=scheduler), OnlineCostModel(BASE)
    recipe = {"cost_model": recipe_of(model), "headroom": "fixed"}
    recorder = StepRecorder(create_log(log), config, NUM_BLOCKS, recipe)
    truth: CostModel = Machine(clock, AT_S + then_s, factor)
    executor = TraceExecutor(NUM_BLOCKS, truth, clock, lambda _: 1 << 30, lambda name: name.startswith("online"))
    headroom = build_headroom("fixed", NUM_BLOCKS)
    observers = [recorder, *([Planning(clock)] if overlap_depth else [])]
    outcome = drive(EngineCore(config, executor, model, headroom, clock, observers=observers), clock, load)
    recorder.close()
    return window_of(outcome)


def window_of(outcome: Outcome) -> Window:
    window_s = AT_S + BEGIN_S, AT_S + END_S
    records = [
        ChatRecord(
            one.arrival_s, token_times_s=[one.first_s, one.last_s], end_s=one.last_s, num_output_tokens=one.tokens
        )
        for one in outcome.measures.online.values()
    ]
    offline = float(outcome.measures.steps(window_s)["computed_tokens"].sum())
    tokens = sum(step.shape.num_tokens for step in outcome.steps if BEGIN_S < step.end_s <= END_S)
    seconds = END_S - BEGIN_S
    return Window(
        seconds=seconds,
        online_tokens_per_s=(tokens - offline) / seconds,
        offline_tokens_per_s=offline / seconds,
        clock_s=window_s,
        records=[record for record in records if window_s[0] <= record.sent_s < window_s[1]],
        early=[record for record in records if record.sent_s < window_s[0]],
    )


@pytest.fixture(scope="module", autouse=True)
def few_draws() -> Iterator[None]:
    """Steps do not scatter here: a median over nine draws would say the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_predict, "DRAWS", 1)
        patch.setattr(live_predict, "CAPPED_DRAWS", 1)
        yield


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("steady")
    return predict(directory / "log", recorded(directory, directory / "log", 99.0, 1.0), TARGETS)


def test_a_machine_that_stays_as_it_is_is_predicted(steady: dict[str, Any]) -> None:
    assert steady["decided_otherwise"] is None
    assert steady["holds"] == {"known_before": True, "known_afterwards": True}
    real, before = steady["real"], steady["known_before"]
    assert before["attainment"] == pytest.approx(real["attainment"], abs=0.06)
    assert before["step_noise"] < 0.02
    assert before["step_error"] < 0.02


def test_one_step_ahead_planning_is_no_part_of_a_step(tmp_path: Path) -> None:
    found = predict(tmp_path / "log", recorded(tmp_path, tmp_path / "log", 99.0, 1.0, overlap_depth=1), TARGETS)
    assert found["decided_otherwise"] is None
    assert found["known_before"]["step_error"] < 0.02
    assert found["holds"]["known_before"]


def test_one_step_ahead_a_first_token_waits_for_plans_that_are_made_early(tmp_path: Path) -> None:
    """A host that takes 5 ms begins 10 ms before the step in flight can end: who comes later waits for another."""
    window = recorded(tmp_path, tmp_path / "log", 99.0, 1.0, overlap_depth=1)
    assert live_predict.read(tmp_path / "log").host_s == pytest.approx(0.005, abs=5e-4)
    found = predict(tmp_path / "log", window, TARGETS)
    real, before = found["real"], found["known_before"]
    assert before["ttft_in_engine_p50_ms"] == pytest.approx(real["ttft_in_engine_p50_ms"], rel=0.03)


def test_a_run_that_was_kept_is_predicted_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "beside"
    window = recorded(tmp_path, late.log_of(kept), 99.0, 1.0)
    late.keep(kept, window, TARGETS)
    live_predict.main([str(kept)])
    *_, line = capsys.readouterr().out.splitlines()
    assert json.loads(line) == predict(late.log_of(kept), window, TARGETS)


def test_the_way_to_the_engine_and_back_is_measured_and_added(tmp_path: Path, steady: dict[str, Any]) -> None:
    """A server that has read a request 5 ms after it was due and whose tokens are 8 ms under way, 18 in the window."""
    window = recorded(tmp_path, tmp_path / "log", 99.0, 1.0)
    for records, back_s in ((window.early, 0.008), (window.records, 0.018)):
        for record in records:
            record.sent_s -= 0.004
            record.due_s = record.sent_s - 0.001
            record.token_times_s = [at_s + back_s for at_s in record.token_times_s]
    found = predict(tmp_path / "log", window, TARGETS)
    real, before, whole = found["real"], found["known_before"], found["known_afterwards"]
    assert [before["way_to_engine_ms"], before["way_to_client_ms"]] == [5.0, 8.0]
    assert [whole["way_to_engine_ms"], whole["way_to_client_ms"]] == [5.0, 18.0]
    assert real["ttft_p50_ms"] == pytest.approx(steady["real"]["ttft_p50_ms"] + 23.0, abs=0.11)
    assert before["ttft_p50_ms"] == pytest.approx(steady["known_before"]["ttft_p50_ms"] + 13.0, abs=0.11)
    in_engine = "ttft_in_engine_p50_ms"
    assert (real[in_engine], before[in_engine]) == (steady["real"][in_engine], steady["known_before"][in_engine])
    assert steady["real"][in_engine] == steady["real"]["ttft_p50_ms"]


def test_the_share_of_the_runs_own_machine_is_what_its_capped_ceiling_leaves(steady: dict[str, Any]) -> None:
    real, ceiling = steady["real"], steady["capped_tokens_per_s"]
    assert real["offline_tokens_per_s"] + real["online_tokens_per_s"] < ceiling
    left = ceiling - real["online_tokens_per_s"]
    assert 0.8 < steady["share_of_it"] < 1.0  # 0.43 of a ceiling whose steps are not capped
    assert steady["share_of_it"] == pytest.approx(real["offline_tokens_per_s"] / left, abs=1e-3)


def test_a_machine_that_changes_in_the_window_is_not_predicted_from_what_came_before(
    tmp_path: Path, steady: dict[str, Any]
) -> None:
    """Its capped ceiling is that of the slower machine: less than the even one's by more than the factor, for a step
    has a fixed part."""
    found = predict(tmp_path / "log", recorded(tmp_path, tmp_path / "log", BEGIN_S, 1.4), TARGETS)
    assert not found["holds"]["known_before"]
    assert found["known_afterwards"]["step_error"] < 0.5 * found["known_before"]["step_error"]
    assert 0.5 < found["capped_tokens_per_s"] / steady["capped_tokens_per_s"] < 1 / 1.4


@pytest.mark.parametrize("name", ERROR_OF)
@pytest.mark.parametrize("apart", [lambda error: 1 + error, lambda error: 1 - error])
def test_each_figure_has_its_own_bound(name: str, apart: Callable[[float], float]) -> None:
    real = dict.fromkeys(ERROR_OF, 1000.0)
    assert holds(real, real | {name: 1000.0 * apart(0.99 * ERROR_OF[name])})
    assert not holds(real, real | {name: 1000.0 * apart(1.01 * ERROR_OF[name])})


def test_it_is_printed_side_by_side(steady: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_prediction(steady)
    assert "offline_tokens_per_s" in (said := capsys.readouterr().out)
    assert "known afterwards" in said
    print_prediction({"failed": "no log"})
    assert capsys.readouterr().out == "no prediction: no log\n"


def test_what_steps_of_a_kind_took_stands_beside_what_was_predicted(steady: dict[str, Any]) -> None:
    shares = {name: value for name, value in steady["known_before"].items() if name.startswith("of_predicted_")}
    # Decodes alone where streams keep for the next prompt what they have.
    assert shares == pytest.approx({"of_predicted_decode": 1.0, "of_predicted_mixed": 1.0}, abs=0.03)


def test_a_kind_that_is_off_is_told_from_the_others() -> None:
    """Decodes take 30 ms and prompts 40, planning 2 ms; a profile that knows no prompts has 30 for both."""
    decode, prompt = BatchShape(), BatchShape()
    decode.add(1, 9)
    prompt.add(16, 0)
    steps = [
        DrivenStep(0.0, 0.028, 0.002, decode),
        DrivenStep(0.03, 0.038, 0.002, prompt),
        DrivenStep(0.2, 0.028, 0.002, decode),
    ]
    model = ConstantCostModel(0.03)
    assert by_kind(model, steps) == pytest.approx({"after_idle": 1.0, "decode": 1.0, "prefill": 4 / 3}, abs=1e-4)

"""``benchmarks.live.late``: where the time of late chats went, on a virtual machine that is slow for a while."""

import re
from pathlib import Path

import msgspec
import pytest

from benchmarks.live import late
from benchmarks.live.late import Half, Parts, SeenChat, SeenRun, StepTime, halves, in_time_without, keep, log_of
from benchmarks.live.plan import Targets, Window
from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import Prediction
from neaptide.engine.record.step_log import create_log
from neaptide.engine.record.step_recorder import StepRecorder
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import Regime
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.recipes import build_headroom, recipe_of
from neaptide.executors.simulated.trace_executor import TraceExecutor
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.simulation.driven_runs import DrivenLoad, drive

TARGETS = Targets(0.25, 0.06)
AT_S, SLOW_S, END_S = 1000.0, 1003.0, 4.0
"""When the run began, when the machine became slow; how long chats came."""
TO_ENGINE_S, TO_CLIENT_S = 0.004, 0.008
COST = StepCost(fixed_s=0.02, gemm_curve_s=(1e-3, 2e-3), pair_s=1e-7, kv_token_s=1e-6)
BASE = RooflineModel(dict.fromkeys(Regime, COST))


class Machine:
    """Implements ``CostModel``: as its profile says, then for half a second six times slower."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def predict(self, shape: BatchShape) -> Prediction:
        factor = 6.0 if SLOW_S <= self._clock.now() < SLOW_S + 0.5 else 1.0
        return Prediction(factor * BASE.predict(shape).seconds, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as ``same_kernels --keep`` leaves it."""
    path = tmp_path_factory.mktemp("kept") / "beside"
    clock, model, num_blocks = VirtualClock(AT_S), OnlineCostModel(BASE), 1024
    load = DrivenLoad.make(1.5, END_S, 500, (TARGETS.ttft_s, TARGETS.tpot_s), 1000, path.parent)
    scheduler = SchedulerConfig(max_model_len=1024, ttft_slo_s=TARGETS.ttft_s, tpot_slo_s=TARGETS.tpot_s)
    config = EngineConfig(cache=CacheConfig(), scheduler=scheduler)
    recipe = {"cost_model": recipe_of(model), "headroom": "fixed"}
    recorder = StepRecorder(create_log(log_of(path)), config, num_blocks, recipe)
    executor = TraceExecutor(num_blocks, Machine(clock), clock, lambda _: 1 << 30, lambda name: name[:2] == "on")
    core = EngineCore(
        config, executor, model, build_headroom("fixed", num_blocks), clock, frozenset(), observers=[recorder]
    )
    outcome = drive(core, clock, load)
    recorder.close()
    records = [
        ChatRecord(
            one.arrival_s - TO_ENGINE_S,
            arrival_s=one.arrival_s - AT_S,
            token_times_s=[one.first_s + TO_CLIENT_S, one.last_s + TO_CLIENT_S],
            end_s=one.last_s + TO_CLIENT_S,
            num_output_tokens=one.tokens,
        )
        for one in outcome.measures.online.values()
    ]
    keep(path, Window(records=records), TARGETS)
    return path


def test_the_time_between_two_moments_is_taken_apart() -> None:
    steps = [
        StepTime(0.000, 0.001, 0.050, 0.020, 0.000, 0.020),
        StepTime(0.050, 0.052, 0.100, 0.020, 0.020, 0.010),
        StepTime(0.100, 0.101, 0.160, 0.020, 0.000, 0.030),
        StepTime(0.160, 0.161, 0.200, 0.020, 0.000, 0.010),
    ]
    found = late.taken_apart(steps, 0.030, 0.160)
    assert found == pytest.approx(Parts(0.020, 0.040, 0.020, 0.040, 0.007, 0.003, 0.0))
    assert late.taken_apart(steps, 0.050, 0.100) == pytest.approx(Parts(0.0, 0.020, 0.020, 0.010, -0.002, 0.002, 0.0))


def test_parts_make_up_what_the_client_saw(kept: Path) -> None:
    seen = msgspec.json.decode(kept.with_name("beside.chats.json").read_bytes(), type=SeenRun)
    logged = late.read(log_of(kept))
    assert logged.difference is None
    found = list(halves(seen, logged))
    assert len(found) == 2 * len(seen.chats)
    for half in found:
        assert sum(half.parts) == pytest.approx(half.seconds)
        assert half.parts.on_the_way == pytest.approx(TO_ENGINE_S + TO_CLIENT_S if half.what == "first token" else 0.0)
    assert max(half.parts.beyond_prediction for half in found) > 0.05
    assert any(half.parts.offline_work > 0.0 for half in found)


def test_the_report_says_who_was_late_and_for_what(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two chats came while the machine was slow: their steps took longer than predicted, or were predicted to be long.

    Without the streams' decodes one would have been in time.
    """
    late.report(kept)
    said = capsys.readouterr().out
    assert said.startswith("beside: 2 of 6 chats late (targets 250 and 60 ms)")
    (row,) = [line for line in said.splitlines() if "first token, 3.23 s" in line]
    found = [float(cell) for cell in re.findall(r"-?\d+\.\d", row)]
    assert found[1:] == pytest.approx([641.8, 61.9, 215.8, 142.9, 0.0, 209.2, 0.0, 12.0], abs=0.2)
    assert "all decisions are the same" in said
    assert re.findall(r"^  ([a-z ]+): 1$", said, re.MULTILINE) == ["online decodes"]


def test_late_in_both_halves_is_one_chat() -> None:
    parts = Parts(offline_work=0.2, beyond_prediction=0.05)
    found = [
        Half(1.0, "first token", 0.40, 0.30, parts),
        Half(1.0, "each token", 0.08, 0.06, Parts(beyond_prediction=0.03)),
        Half(2.0, "first token", 0.34, 0.30, parts),
    ]
    without = in_time_without(found)
    assert (without["offline_work"], without["beyond_prediction"], without["on_the_way"]) == (1, 1, 0)


def test_a_chat_without_a_token_is_late() -> None:
    assert not SeenChat.of(ChatRecord(0.0, error="unfinished"), TARGETS).is_in_time


def test_what_was_kept_is_what_the_clients_saw(tmp_path: Path) -> None:
    good = ChatRecord(5.0, arrival_s=4.0, due_s=4.9, token_times_s=[5.1, 5.11, 5.2], num_output_tokens=3)
    slow = ChatRecord(6.0, arrival_s=5.0, token_times_s=[6.2, 6.5], num_output_tokens=2)
    failed = ChatRecord(7.0, arrival_s=6.0, token_times_s=[7.1], num_output_tokens=1, error="gone")
    window = Window(
        online_tokens_per_s=7.0,
        offline_tokens_per_s=9.0,
        clock_s=(5.0, 8.0),
        records=[good, slow, failed],
        early=[ChatRecord(1.0, token_times_s=[1.2], num_output_tokens=1), ChatRecord(2.0, error="unfinished")],
    )
    keep(tmp_path / "run", window, TARGETS)
    seen = late.seen_of(tmp_path / "run")
    found = seen.window
    assert seen.targets == TARGETS
    assert (found.online_tokens_per_s, found.offline_tokens_per_s, found.clock_s) == (7.0, 9.0, (5.0, 8.0))
    for ours, theirs in ((found.records, window.records), (found.early, window.early)):
        assert [(r.sent_s, r.start_s, r.ttft_s, r.tpot_s) for r in ours] == [
            (r.sent_s, r.start_s, r.ttft_s, r.tpot_s) for r in theirs
        ]
        assert [r.met(TARGETS.ttft_s, TARGETS.tpot_s) for r in ours] == [
            r.met(TARGETS.ttft_s, TARGETS.tpot_s) for r in theirs
        ]

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from neaptide.engine.record.step_log import AddLine, BatchLine, RowLine, StepLine, read_log
from neaptide.engine.scheduler import policies
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.replica import SimulationError
from neaptide.simulation.simulator import simulate
from tests.golden.renew import write_log
from tests.simulation.scenes import STEP_S, constant, mixed, offline, online


def test_nothing_to_simulate_is_refused() -> None:
    with pytest.raises(ValueError, match="neither online nor offline"):
        simulate(constant())


# ---- times, by hand: every step takes 0.1 s ----


def test_first_token_and_further_tokens_by_hand() -> None:
    """The clock jumps to 0.05, prefill until 0.15; the second comes at 0.06 and is handed in at 0.15."""
    result = simulate(constant(online((0.05, 8, 3), (0.06, 8, 2)))).result.online
    assert result.requests == 2
    assert result.ttft_s["p50"] == pytest.approx((0.10 + 0.19) / 2)
    assert result.ttft_s["p99"] == pytest.approx(0.10 + 0.99 * 0.09)
    assert result.tpot_s["p50"] == pytest.approx(0.1)
    assert result.itl_s["p90"] == pytest.approx(0.1)
    assert result.normalized_latency_s == pytest.approx(((0.35 - 0.05) / 3 + (0.35 - 0.06) / 2) / 2)


def test_a_request_of_n_tokens_runs_n_sampling_steps() -> None:
    for tokens in (1, 2, 7):
        run = simulate(constant(online((0.0, 8, tokens))))
        assert run.result.steps == tokens
        latency_s = run.result.online.normalized_latency_s
        assert latency_s == pytest.approx(STEP_S)


def test_one_output_token_has_met_its_pace_and_has_none() -> None:
    result = simulate(constant(online((0.0, 8, 1)), tpot_slo_s=1e-6)).result.online
    assert result.tpot_s == {"p50": None, "p90": None, "p99": None}
    assert result.attainment == {"ttft": 1.0, "tpot": 1.0, "both": 1.0, "both_from_arrival": 1.0}


def test_attainment_counts_each_target_and_both() -> None:
    """TTFT 0.1, 0.1 and 0.15; the last one's gaps are met, all targets stand between 0.1 and 0.15."""
    requests = online((0.0, 8, 1), (1.0, 8, 4), (1.05, 8, 3))
    result = simulate(constant(requests, ttft_slo_s=0.12, tpot_slo_s=0.12)).result.online
    shares = {"ttft": 2 / 3, "tpot": 1.0, "both": 2 / 3, "both_from_arrival": 2 / 3}
    assert result.attainment == pytest.approx(shares)
    assert result.goodput_rps == pytest.approx(2 / 1.05)


@pytest.mark.parametrize(
    ("ttft_slo_s", "tpot_slo_s", "tpot", "from_arrival"),
    [
        (0.3, 0.08, 0.0, 1.0),  # 20 ms late at every gap; 200 ms of the first token's time are left
        (0.27, 0.08, 0.0, 0.0),  # the eleventh token is 0.1 + 10 x 0.02 s behind
        (0.09, 0.2, 1.0, 0.0),  # the first token is late, though the others catch up
    ],
)
def test_deadlines_from_arrival_let_an_early_first_token_pay_for_slow_gaps(
    ttft_slo_s: float, tpot_slo_s: float, tpot: float, from_arrival: float
) -> None:
    """Eleven tokens at 0.1, 0.2, ... 1.1 s."""
    scene = constant(online((0.0, 8, 11)), ttft_slo_s=ttft_slo_s, tpot_slo_s=tpot_slo_s, policy="fcfs")
    attainment = simulate(scene).result.online.attainment
    assert (attainment["tpot"], attainment["both_from_arrival"]) == (tpot, from_arrival)


def test_unfinished_requests_are_missed_and_their_wait_is_counted() -> None:
    run = simulate(constant(online((0.0, 8, 1), (0.5, 8, 100)), drain_s=1.0))
    assert run.num_unfinished == 1
    assert run.result.online.attainment == {"ttft": 0.5, "tpot": 0.5, "both": 0.5, "both_from_arrival": 0.5}
    waiting = simulate(constant(online((0.0, 8, 50), (0.05, 8, 1)), drain_s=0.9, max_num_seqs=1))
    assert waiting.num_unfinished == 2
    assert waiting.result.online.ttft_s["p99"] == pytest.approx(0.1 + 0.99 * (1.0 - 0.05 - 0.1), abs=0.02)


def test_the_wall_time_of_planning_is_measured_and_enters_no_virtual_time() -> None:
    result = simulate(constant(online((0.0, 8, 20)))).result
    assert result.scheduler_ms["mean"] is not None
    assert result.scheduler_ms["mean"] > 0
    assert result.online.itl_s["p99"] == pytest.approx(STEP_S)
    assert result.online.longest_gap_s == pytest.approx(STEP_S)


# ---- windows and offline counts ----


def test_the_window_runs_from_the_first_to_the_last_arrival() -> None:
    """Steps end at 0.1, 0.2, ...: rows of 4 own tokens and 5 outputs, two at a time, beside idle online work."""
    run = simulate(constant(online((0.0, 4, 1), (1.0, 4, 1)), [offline(*[(0, 4, 5)] * 20)], refill=False))
    assert run.window_s == (0.0, 1.0)
    result = run.result.offline
    # All 20 prompts and the online one fit into the first step: it gives 20 x 4 + 20 tokens, the next four 20 each.
    assert result.requests_completed == 20
    assert result.tokens_per_s == pytest.approx(20 * (4 + 5))
    assert result.output_tokens_per_s == pytest.approx(100)
    # The last sampled token of a row is never computed.
    assert result.computed_tokens_per_s == pytest.approx(20 * (4 + 4))
    assert result.makespan_s == pytest.approx(0.5)


def test_a_window_may_be_given_and_what_lies_around_it_only_loads_the_engine() -> None:
    """One seat: the first request holds it until 0.3, so the second, alone in the window, waits."""
    requests = online((0.0, 8, 3), (0.1, 8, 1), (2.0, 8, 9))
    run = simulate(constant(requests, window_s=(0.05, 1.0), max_num_seqs=1, policy="fcfs"))
    assert run.result.online.requests == 1
    assert run.result.online.ttft_s["p50"] == pytest.approx(0.3)
    assert run.result.online.goodput_rps == pytest.approx(1 / 0.95)


@pytest.mark.parametrize("requests", [online((0.0, 4, 1)), ()])
def test_a_run_with_offline_work_goes_on_to_the_end_of_a_given_window(requests: list[TraceRequest]) -> None:
    """Every step samples a token of the only row that has a seat, and each row's fourth step is its last."""
    run = simulate(constant(requests, [offline(*[(0, 4, 4)] * 4)], window_s=(1.05, 3.05), max_num_seqs=1))
    assert run.result.offline.output_tokens_per_s == pytest.approx(10)
    assert run.result.valid


def test_a_pool_that_is_dry_before_a_given_window_opens_is_no_harm() -> None:
    """The first planning takes all four rows and leaves seats."""
    scene = constant(online((0.0, 4, 1)), [offline(*[(0, 4, 4)] * 4)], refill=False, max_num_seqs=8)
    assert simulate(replace(scene, window_s=(0.0, 0.05))).dry_s == pytest.approx(0.0)
    assert simulate(replace(scene, window_s=(5.0, 6.0))).dry_s is None


def test_a_run_without_online_work_is_cut_at_both_ends() -> None:
    run = simulate(constant((), [offline(*[(0, 4, 10)] * 4)], max_num_seqs=1))
    assert run.result.offline.makespan_s == pytest.approx(4.0)
    assert run.window_s == (pytest.approx(0.4), pytest.approx(3.6))
    # Steps that end in (0.4, 3.6]: 32 of 40. Each samples a token, three of them compute a prompt of 4 as well.
    assert run.result.offline.output_tokens_per_s == pytest.approx(32 / 3.2)
    assert run.result.offline.tokens_per_s == pytest.approx((32 + 3 * 4) / 3.2)
    assert run.result.valid


def test_online_work_alone_has_an_empty_pool() -> None:
    result = simulate(constant(online((0.0, 8, 3), (0.3, 8, 3)))).result
    assert result.valid
    assert result.offline.tokens_per_s == 0
    assert result.kv.saving_ratio_bound is None
    assert result.kv.hit_ratio is None


def test_a_pool_that_runs_dry_inside_the_window_makes_the_result_invalid() -> None:
    requests = online((0.0, 4, 1), (5.0, 4, 1))
    sets = [offline(*[(0, 4, 5)] * 4)]
    dry = simulate(constant(requests, sets, refill=False, max_num_seqs=4))
    assert not dry.result.valid
    assert dry.dry_s is not None
    assert dry.dry_s <= 5.0
    refilled = simulate(constant(requests, sets, max_num_seqs=4))
    assert refilled.result.valid
    assert refilled.result.offline.requests_completed > 4


def test_a_pool_that_runs_dry_after_the_window_is_no_harm() -> None:
    run = simulate(
        constant(online((0.0, 4, 1), (0.25, 4, 1)), [offline(*[(0, 4, 20)] * 6)], refill=False, max_num_seqs=2)
    )
    assert run.result.valid


def test_a_refill_brings_fresh_contents(tmp_path: Path) -> None:
    requests = online((0.0, 4, 1), (3.0, 4, 1))
    simulate(constant(requests, [offline((8, 4, 2), (8, 4, 2))], max_num_seqs=2), step_log=tmp_path / "log")
    firsts = [line.blocks[0] for line in read_log(tmp_path / "log") if isinstance(line, RowLine)]
    jobs = [firsts[k : k + 2] for k in range(0, len(firsts) - 1, 2)]
    assert len(jobs) > 2
    assert len({first for first, _ in jobs}) == len(jobs)
    assert all(first == second for first, second in jobs), "what a generation shares it still shares"


def test_a_set_in_batches_submits_the_next_when_the_last_has_ended(tmp_path: Path) -> None:
    run = simulate(constant((), [offline(*[(0, 4, 3)] * 6, batch_size=2)]), step_log=tmp_path / "log")
    jobs = [line.now_s for line in read_log(tmp_path / "log") if isinstance(line, BatchLine)]
    assert jobs == pytest.approx([0.0, 0.3, 0.6])
    assert run.result.valid, "an empty pool between two batches is the set's nature"


def test_prefix_hits_and_saving_by_hand() -> None:
    """Four prompts of 8 shared and 4 own tokens, one after another: the first computes all, three find 8."""
    sets = [offline(*[(8, 4, 1)] * 4)]
    result = simulate(constant(online((0.0, 4, 1), (10.0, 4, 1)), sets, max_num_seqs=1, refill=False)).result
    assert result.kv.hit_ratio == pytest.approx(3 * 8 / (4 * 12))
    assert result.kv.saving_ratio == pytest.approx(3 * 8 / (4 * 12))
    assert result.kv.saving_ratio_bound == pytest.approx(3 * 8 / (4 * 12))
    assert result.wasted_tokens == 0


def test_tokens_computed_twice_are_waste(tmp_path: Path) -> None:
    """The engine counts what the executor saw twice."""
    result = write_log(tmp_path / "log").result
    assert sum(result.preemptions.count_by_class.values()) > 10
    assert 0 < result.wasted_tokens == result.preemptions.recomputed_tokens


@pytest.mark.parametrize("policy", ["neaptide", "fcfs", "priority"])
def test_every_prompt_and_output_token_counts_exactly_once(policy: str) -> None:
    """Whatever was preempted, found in the cache, and computed again."""
    scene = mixed(policy=policy, refill=False, online=mixed().online + online((5.0, 4, 1)))
    run = simulate(scene)
    rows = scene.offline[0].requests
    steps = run.measures.steps((-1.0, math.inf))
    assert steps["prompt_tokens"].sum() == sum(row.input_tokens for row in rows)
    assert steps["output_tokens"].sum() == sum(row.output_tokens for row in rows)
    assert steps["admitted_tokens"].sum() == sum(row.input_tokens for row in rows)
    assert len(run.measures.offline_ends_s) == len(rows)
    assert [record.tokens for record in run.measures.online.values()] == [r.output_tokens for r in scene.online]


def test_occupancy_adds_up() -> None:
    shares = simulate(mixed()).result.kv.occupancy_by_class
    assert set(shares) == {"online", "offline", "cached", "free"}
    assert sum(shares.values()) == pytest.approx(1.0)


def test_deadline_misses_count_late_rows_and_open_rows_of_late_jobs() -> None:
    sets = [offline(*[(0, 4, 10)] * 4)]
    late = simulate(constant((), sets, max_num_seqs=1, refill=False, offline_deadline_s=2.5)).result.offline
    assert late.deadline_misses == 2
    short = constant(online((0.0, 4, 1), (2.05, 4, 1)), sets, max_num_seqs=2, refill=False, offline_deadline_s=1.5)
    assert simulate(short).result.offline.deadline_misses >= 1


def test_prompts_beyond_the_context_are_left_out_and_outputs_are_cut() -> None:
    run = simulate(constant(online((0.0, 64, 1), (0.1, 30, 10)), max_model_len=32))
    assert run.num_left_out == 1
    assert run.result.online.requests == 1
    assert run.result.steps == 2


# ---- honesty ----


def test_predictions_are_judged_on_noisy_steps() -> None:
    result = simulate(mixed(step_noise=0.2)).result
    assert result.prediction["mape"] is not None
    assert 0.05 < result.prediction["mape"] < 0.5
    exact = simulate(mixed()).result
    assert exact.prediction["mape"] == pytest.approx(0.0, abs=1e-9)
    assert exact.prediction["coverage"] == 1.0


def test_the_scheduler_believes_its_own_model_not_the_truth() -> None:
    result = simulate(constant(online((0.0, 8, 30), (3.0, 8, 1)), truth=ConstantCostModel(0.2))).result
    assert result.online.itl_s["p50"] == pytest.approx(0.2)
    assert result.prediction == {"mape": pytest.approx(0.5), "coverage": 0.0}


def test_the_scheduler_never_sees_a_length(tmp_path: Path) -> None:
    """Two scenes that differ in one answer's length decide alike until the shorter one has ended."""
    scene = mixed()
    longest = max(range(len(scene.online)), key=lambda k: scene.online[k].output_tokens)
    requests = list(scene.online)
    requests[longest] = replace(requests[longest], output_tokens=requests[longest].output_tokens + 40)
    logs = []
    for name, scenario in (("a", scene), ("b", replace(scene, online=requests))):
        simulate(scenario, step_log=tmp_path / name)
        logs.append((tmp_path / name).read_bytes().splitlines())
    ends = next(
        k for k, line in enumerate(read_log(tmp_path / "a")) if ended(line, f"online-{longest}", tmp_path / "a")
    )
    assert ends > 20
    assert logs[0][:ends] == logs[1][:ends]
    assert logs[0][ends] != logs[1][ends]
    added = [line for line in read_log(tmp_path / "a") if isinstance(line, AddLine)]
    assert all(line.tokens + line.max_tokens == scene.max_tokens for line in added)


def ended(line: object, request_id: str, log: Path) -> bool:
    """Whether a line of ``log`` ends the request."""
    names: list[str] = []
    for other in read_log(log):
        if isinstance(other, AddLine):
            names.append(other.id)
        elif isinstance(other, BatchLine):
            names += [f"{other.id}:{row}" for row, *_ in other.rows]
    return isinstance(line, StepLine) and any(names[handle] == request_id for handle, *_ in line.end)


def test_the_same_seed_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from neaptide.simulation.simulator import simulate; "
        "from tests.simulation.scenes import mixed; simulate(mixed(step_noise=0.1), step_log=Path(sys.argv[1]))"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)], env=os.environ | {"PYTHONHASHSEED": name})
        for name in ("1", "2")
    ]
    assert [child.wait() for child in children] == [0, 0]
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_another_seed_draws_other_noise() -> None:
    first, second = (simulate(constant(online((0.0, 8, 30)), step_noise=0.1, seed=seed)) for seed in (1, 2))
    assert first.result.online.normalized_latency_s != second.result.online.normalized_latency_s


class Idle(Scheduler):
    """Runs no request."""

    def pack(self, draft: Draft) -> float:
        return 0.0


def test_a_policy_that_stands_still_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies.POLICIES, "idle", Idle)
    with pytest.raises(SimulationError, match="idle has run no request"):
        simulate(constant(online((0.0, 8, 3)), policy="idle"))


# ---- offline rows that arrive over time ----


def arriving_scene(*arrivals_s: float) -> OfflineSet:
    rows = offline(*((0, 8, 2) for _ in arrivals_s)).requests
    return OfflineSet("scene", [replace(r, arrival_s=a) for r, a in zip(rows, arrivals_s, strict=True)], synthetic=True)


def test_offline_rows_start_when_they_arrive() -> None:
    run = simulate(constant(offline_sets=[arriving_scene(0.0, 0.0, 5.0, 2.0)]))
    assert run.measures.offline_ends_s == pytest.approx([0.2, 0.2, 2.2, 5.2])
    assert run.result.valid
    assert run.result.offline.makespan_s == pytest.approx(5.2)


def test_rows_that_arrive_beside_online_work_are_not_refilled() -> None:
    run = simulate(constant(online((0.0, 8, 2), (4.0, 8, 2)), [arriving_scene(1.0, 3.0)]))
    assert run.measures.offline_ends_s == pytest.approx([1.2, 3.2])
    assert run.result.valid


def test_rows_that_would_arrive_after_the_end_are_not_waited_for() -> None:
    run = simulate(constant(online((0.0, 8, 2), (1.0, 8, 2)), [arriving_scene(0.5, 50.0)]))
    assert len(run.measures.offline_ends_s) == 1


def test_batches_by_turns_cannot_arrive_over_time() -> None:
    scene = replace(arriving_scene(0.0, 1.0), batch_size=1)
    with pytest.raises(ValueError, match="cannot have arrivals"):
        simulate(constant(offline_sets=[scene]))


def test_a_context_that_no_online_request_fits_into_is_refused() -> None:
    with pytest.raises(ValueError, match="fit into a context of 1 tokens"):
        simulate(constant(online((0.0, 8, 2)), max_model_len=1))

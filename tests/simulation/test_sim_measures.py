"""What a simulation says of a run that does not end well: rows that wait, pools that run dry, answers that are cut."""

import pytest

from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation import simulator
from neaptide.simulation.measures import OutOfReach
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import constant, offline, online, profile

# ---- how long rows wait ----


def test_rows_that_never_start_have_waited_until_the_end_of_the_run() -> None:
    """One seat, and an online request of 20 steps holds it."""
    scene = constant(online((0.0, 8, 20)), [offline(*[(0, 4, 1)] * 3)], policy="priority", max_num_seqs=1)
    result = simulate(scene).result.offline
    assert result.requests_completed == 0
    assert result.longest_wait_s == pytest.approx(2.0)


def test_the_wait_of_a_row_that_has_not_ended_counts() -> None:
    """Two online requests hold both seats for 0.5 s; the row starts then and outlives the run."""
    requests = online((0.0, 4, 5), (0.0, 4, 5), (1.0, 4, 1))
    scene = constant(requests, [offline((0, 4, 100))], policy="fcfs", max_num_seqs=2, refill=False)
    result = simulate(scene).result.offline
    assert result.requests_completed == 0
    assert result.longest_wait_s == pytest.approx(0.5)


def test_without_offline_work_nobody_waits() -> None:
    assert simulate(constant(online((0.0, 8, 3)))).result.offline.longest_wait_s is None


# ---- runs that are given up ----


@pytest.fixture
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "PROGRESS_STEPS", 1)


@pytest.mark.usefixtures("always_looking")
def test_a_run_is_given_up_once_too_many_have_missed_their_pace() -> None:
    """The first and the last of three chats do, at their ends; then a third of them at most can attain."""
    scene = constant(online((0.0, 8, 3), (1.0, 8, 1), (2.0, 8, 3)), tpot_slo_s=0.05)
    assert simulate(scene, least_attainment=1 / 3).result.online.attainment["both"] == pytest.approx(1 / 3)
    with pytest.raises(OutOfReach, match=r"2 online requests have missed a target by 2\.3 s"):
        simulate(scene, least_attainment=0.34)


@pytest.mark.usefixtures("always_looking")
def test_a_request_that_waits_for_its_first_token_has_missed_it_when_that_was_due() -> None:
    """One seat, and another holds it for two seconds."""
    scene = constant(online((0.0, 8, 20), (0.0, 8, 1)), policy="fcfs", max_num_seqs=1, ttft_slo_s=0.5)
    with pytest.raises(OutOfReach, match=r"1 online requests have missed a target by 0\.6 s"):
        simulate(scene, least_attainment=1.0)


# ---- pools that run dry ----


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_small_set_is_refilled_until_it_outlasts_every_planning(num_rows: int) -> None:
    left: list[int] = []

    class Watch(EngineObserver):
        def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
            left.append(len(scheduler.queues.pool))

    scene = constant(online((0.0, 4, 1), (3.0, 4, 1)), [offline(*[(0, 4, 2)] * num_rows)], max_num_seqs=8)
    run = simulate(scene, observers=[Watch()])
    assert run.result.valid
    assert min(left) > 0
    # Every seat but the two that online requests take for a step samples at every step of the window.
    assert run.result.offline.output_tokens_per_s == pytest.approx(10 * 8, rel=0.05)


def test_a_pool_that_planning_empties_is_dry_at_once() -> None:
    """Two rows for eight seats: offline work is missing from the first step on."""
    scene = constant(online((0.0, 4, 1), (3.0, 4, 1)), [offline(*[(0, 4, 40)] * 2)], max_num_seqs=8, refill=False)
    run = simulate(scene)
    assert not run.result.valid
    assert run.dry_s == 0.0


def test_an_empty_pool_behind_full_seats_is_not_dry() -> None:
    run = simulate(constant((), [offline(*[(0, 4, 10)] * 4)], max_num_seqs=4, refill=False))
    assert run.result.offline.makespan_s == pytest.approx(1.0)
    assert run.result.valid


def test_a_pool_is_watched_from_the_first_online_arrival() -> None:
    run = simulate(constant(online((5.0, 4, 1), (6.0, 4, 1)), [offline((0, 4, 5))], refill=False))
    assert run.dry_s == 5.0


# ---- what sharing saves ----


def test_the_last_token_of_a_prompt_computed_alone_is_not_saved() -> None:
    """Two prompts of 33 tokens with 32 in common: the second computes one token, as a decode by the engine's count."""
    sets = [offline((32, 1, 4), (32, 1, 4))]
    scene = constant(
        online((0.0, 4, 1), (10.0, 4, 1)), sets, profile=profile(64, 16), block_size=16, max_num_seqs=1, refill=False
    )
    result = simulate(scene).result.kv
    assert result.saving_ratio == pytest.approx(32 / 66)
    assert result.saving_ratio_bound == pytest.approx(32 / 66)


# ---- what cannot be ----


def test_sets_that_cannot_be_refilled_are_refused_before_the_run() -> None:
    sets = [OfflineSet("own ids", [TraceRequest(0.0, ((100, 4),), 2)], synthetic=True)]
    with pytest.raises(ValueError, match="'own ids' cannot be refilled: content id 100"):
        simulate(constant((), sets))
    assert simulate(constant((), sets, refill=False)).result.offline.makespan_s == pytest.approx(0.2)


def test_answers_that_are_cut_are_counted() -> None:
    """Contexts of 32: 30 + 10, 4 + 29 and 32 + 1 do not fit, the last has no room at all."""
    scene = constant(
        online((0.0, 30, 10), (0.1, 4, 28)), [offline((0, 4, 29), (0, 32, 1))], max_model_len=32, refill=False
    )
    run = simulate(scene)
    assert run.num_cut == 2
    assert run.num_left_out == 1


def test_a_cap_on_what_clients_ask_for_cuts_answers() -> None:
    run = simulate(constant(online((0.0, 8, 10), (0.0, 8, 3)), max_output_tokens=5))
    assert run.num_cut == 1
    assert [record.tokens for record in run.measures.online.values()] == [5, 3]


def test_one_instant_of_arrivals_has_no_rates() -> None:
    result = simulate(constant(online((1.0, 8, 3), (1.0, 8, 3)), [offline(*[(0, 4, 2)] * 8)])).result
    assert result.online.attainment["both"] == 1.0
    assert result.online.goodput_rps is None
    offline_rates = (
        result.offline.tokens_per_s,
        result.offline.output_tokens_per_s,
        result.offline.computed_tokens_per_s,
    )
    assert offline_rates == (None, None, None)

"""What is counted as work: everything once, wherever the steps are cut. And when offline work was left undone."""

import pytest

from neaptide.simulation.bound import UnitCosts
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.bros.gaps import OfflineGaps
from neaptide_lab.experiments.bros.work import WorkTally
from tests.simulation.scenes import constant, mixed, offline, online, profile

EVER = (0.0, 1e9)


def tally_of(scene: Scenario, window_s: tuple[float, float] = EVER) -> WorkTally:
    tally = WorkTally(window_s)
    simulate(scene, observers=[tally])
    return tally


def test_a_request_is_its_prompt_its_answer_and_what_they_read() -> None:
    shape = tally_of(constant(online((0.0, 8, 3)))).online
    assert (shape.prefill_tokens, shape.prefill_requests, shape.prefill_attention_pairs) == (8, 1, 36)
    assert (shape.decode_requests, shape.decode_context_tokens) == (2, 9 + 10)


def test_chunks_do_not_change_the_work() -> None:
    whole = tally_of(constant(online((0.0, 40, 3)))).online
    cut = tally_of(constant(online((0.0, 40, 3)), max_num_batched_tokens=16)).online
    assert cut.prefill_attention_pairs == whole.prefill_attention_pairs == 820
    assert cut.num_tokens == whole.num_tokens
    assert cut.prefill_requests == 1


def test_what_a_drop_makes_computed_again_counts_once() -> None:
    scene = mixed(policy="priority", refill=False, drain_s=60.0)
    run = simulate(scene)
    assert run.result.wasted_tokens > 0
    tally = tally_of(scene)
    assert tally.online.prefill_tokens == sum(request.input_tokens for request in scene.online)
    assert tally.online.decode_requests == sum(request.output_tokens - 1 for request in scene.online)


def test_classes_are_apart_and_steps_outside_the_window_do_not_count() -> None:
    scene = constant(online((0.0, 8, 1), (1.0, 8, 1)), [offline((0, 4, 1), (0, 4, 1))], refill=False)
    tally = tally_of(scene, (0.0, 0.5))
    assert tally.online.prefill_tokens == 8
    assert tally.offline.prefill_tokens == 8


def test_work_is_per_second_of_window_at_the_costs_of_the_profile() -> None:
    tally = tally_of(constant(online((0.0, 8, 3))), (0.0, 2.0))
    work = tally.work(profile())
    costs = UnitCosts.of(profile())
    seconds = (
        10 * costs.token_s
        + 36 * costs.pair_s
        + 19 * costs.kv_token_s
        + costs.prefill_request_s
        + 2 * costs.decode_request_s
    )
    assert work.online_tokens_per_s == 11 / 2.0
    assert work.online == pytest.approx(seconds / 2.0)
    assert work.total == work.online


def gaps_of(scene: Scenario) -> str:
    gaps = OfflineGaps(EVER)
    simulate(scene, observers=[gaps])
    return str(gaps)


def test_steps_without_the_offline_requests_that_hold_kv_are_told() -> None:
    """Round-Robin serves the classes in turn: of five steps the row sits out the third and the fifth."""
    scene = constant(online((0.0, 8, 3)), [offline((0, 4, 9))], policy="round-robin", refill=False)
    assert gaps_of(scene).startswith("40% of the time went to steps in which every resident offline request sat out, 0")


def test_steps_after_the_last_row_are_told() -> None:
    scene = constant(online((0.0, 8, 4)), [offline((0, 4, 2))], policy="fcfs", refill=False)
    assert "sat out, 50% had none to run; rows waited for 0% of it" in gaps_of(scene)


def test_blocks_that_rows_wait_for_are_told() -> None:
    """Seats for two: the online request holds 3 of 64 blocks, the first row 1 to 2; the other row waits."""
    rows = [offline((0, 4, 4), (0, 4, 4))]
    scene = constant(online((0.0, 8, 4)), rows, policy="fcfs", refill=False, max_num_seqs=2, headroom="fixed")
    assert "rows waited for 100% of it, while 9" in gaps_of(scene)

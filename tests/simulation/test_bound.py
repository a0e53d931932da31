"""The clairvoyant bound, on cases small enough to be worked out by hand."""

from collections.abc import Sequence

import msgspec
import pytest

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.simulation.bound import (
    Bounds,
    BoundWork,
    OfflineMix,
    TargetsKept,
    UnitCosts,
    add_request,
    bound_tokens_per_s,
    cached_prefixes,
    most_tokens,
    num_due,
)
from neaptide.simulation.simulator import simulate
from tests.simulation.scenes import constant, offline, online, profile

NOTHING = dict.fromkeys(UnitCosts.__slots__, 0.0)
MILLISECOND_A_TOKEN = StepCost(fixed_s=9.0, weights_s=9.0, gemm_curve_s=(1e-3, 2e-3), pair_s=0.0, kv_token_s=0.0)


def with_costs(prefill: StepCost, decode: StepCost, mixed: StepCost) -> DeviceProfile:
    return msgspec.structs.replace(profile(), costs={"prefill": prefill, "decode": decode, "mixed": mixed})


# ---- the window ----


def mix(prefill: BoundWork, decode: BoundWork, caches: float = 0.0, *, shares: bool = False) -> OfflineMix:
    """60 prompt and 40 output tokens."""
    return OfflineMix(prefill, decode, 60, 40, caches, shares)


@pytest.mark.parametrize(
    ("kappa", "sets"),
    [
        (1.0, (10 - 2 - 1) / (4 + 2)),  # nothing overlaps
        (0.0, (10 - 2) / 4),  # compute decides: its 2 + 4 x against memory's 1 + 2 x
        (0.5, (10 - 2.5) / 5),
    ],
)
def test_the_rest_of_the_window_is_filled(kappa: float, sets: float) -> None:
    offline = mix(BoundWork(3.0, 0.5), BoundWork(1.0, 1.5))
    assert most_tokens(10.0, BoundWork(2.0, 1.0), offline, kappa) == pytest.approx(100 * sets)


def test_what_is_short_changes_as_the_window_fills() -> None:
    """Online work computes, offline work reads: 6 + x against 0 + 2 x; at the end memory decides."""
    offline = mix(BoundWork(1.0, 0.0), BoundWork(0.0, 2.0))
    assert most_tokens(10.0, BoundWork(6.0, 0.0), offline, 0.0) == pytest.approx(400)
    assert most_tokens(14.0, BoundWork(6.0, 0.0), offline, 0.0) == pytest.approx(700)


def test_what_never_overlaps_is_added() -> None:
    offline = mix(BoundWork(2.0, 0.0, 0.5), BoundWork(1.0, 1.0, 0.5))
    assert most_tokens(10.0, BoundWork(2.0, 1.0, 1.0), offline, 0.0) == pytest.approx(100 * (10 - 3) / 4)


def test_a_window_without_room_has_none() -> None:
    assert most_tokens(1.0, BoundWork(2.0, 0.0), mix(BoundWork(1.0, 0.0), BoundWork(1.0, 0.0)), 1.0) == 0.0


def test_prompts_may_be_computed_whose_outputs_come_behind_the_window() -> None:
    """The cache holds half a set: its decodes' 4 s are left over, and so are its 20 output tokens."""
    assert most_tokens(
        10.0, BoundWork(0.0, 0.0), mix(BoundWork(2.0, 0.0), BoundWork(8.0, 0.0), 0.5), 1.0
    ) == pytest.approx(140 - 20)


def test_outputs_that_cost_little_are_not_left_over() -> None:
    assert most_tokens(
        10.0, BoundWork(0.0, 0.0), mix(BoundWork(8.0, 0.0), BoundWork(2.0, 0.0), 0.5), 1.0
    ) == pytest.approx(100)


def test_prefixes_may_have_been_computed_before_the_window() -> None:
    offline = mix(BoundWork(8.0, 0.0), BoundWork(2.0, 0.0), 0.5, shares=True)
    assert most_tokens(10.0, BoundWork(0.0, 0.0), offline, 1.0) == pytest.approx(100 * (10 + 4) / 10)


# ---- the work ----


def test_work_of_a_request() -> None:
    """A prompt of 10 with 4 cached computes 6 on 4: 6 x 4 + 21 pairs. Two decodes read 11 and 12."""
    shape = BatchShape()
    add_request(shape, prompt_tokens=10, cached_tokens=4, output_tokens=3)
    assert shape.prefill_attention_pairs == 45
    assert UnitCosts(**NOTHING | {"token_s": 1.0}).work(shape) == BoundWork(8.0, 0.0)
    assert UnitCosts(**NOTHING | {"row_s": 1.0}).work(shape) == BoundWork(3.0, 0.0)
    assert UnitCosts(**NOTHING | {"pair_s": 1.0}).work(shape) == BoundWork(45.0, 0.0)
    assert UnitCosts(**NOTHING | {"kv_token_s": 1.0}).work(shape) == BoundWork(0.0, 4.0 + 11.0 + 12.0)
    assert UnitCosts(**NOTHING | {"link_token_s": 1.0}).work(shape) == BoundWork(0.0, 0.0, 8.0)
    assert UnitCosts(**NOTHING | {"decode_request_s": 1.0}).work(shape) == BoundWork(0.0, 0.0, 2.0)
    assert UnitCosts(**NOTHING | {"prefill_request_s": 1.0}).work(shape) == BoundWork(0.0, 0.0, 1.0)


def test_a_unit_costs_the_least_of_all_regimes_and_sizes() -> None:
    """Per token 4, 3, 2 (6 for 3), then 1 for each one more; another regime has 1.5 everywhere."""
    falling = StepCost(fixed_s=1.0, gemm_curve_s=(4.0, 6.0, 6.0, 8.0), pair_s=5.0, kv_token_s=1.0)
    level = StepCost(fixed_s=1.0, gemm_curve_s=(1.5, 3.0), pair_s=2.0, kv_token_s=3.0)
    costs = UnitCosts.of(with_costs(prefill=falling, decode=level, mixed=level))
    assert (costs.token_s, costs.pair_s, costs.kv_token_s) == (1.5, 2.0, 1.0)
    steep = StepCost(fixed_s=1.0, gemm_curve_s=(4.0, 6.0, 6.0, 7.0), pair_s=5.0, kv_token_s=1.0)
    assert UnitCosts.of(with_costs(prefill=steep, decode=level, mixed=level)).token_s == 1.0


def test_a_token_has_its_part_of_the_fixed_cost_which_has_the_first_one_in_a_measured_profile() -> None:
    """Steps of 1, 2 and 3 tokens take 2, 2 and 5: the cheapest token is one of two."""
    measured = StepCost(fixed_s=2.0, gemm_curve_s=(0.0, 0.0, 3.0), pair_s=0.0, kv_token_s=0.0)
    assert UnitCosts.of(with_costs(*[measured] * 3)).token_s == 1.0


@pytest.mark.parametrize(
    ("prompts", "cached"),
    [
        ([((1, 8), (2, 5)), ((1, 8), (3, 5))], [0, 8]),
        ([((1, 8),), ((1, 8),)], [0, 4]),  # the last token is always computed, and with it its block
        ([((1, 6), (2, 5)), ((1, 6), (3, 5))], [0, 4]),  # whole blocks
        ([((1, 12),), ((1, 9), (2, 9))], [0, 8]),  # the shorter text is a head of the longer
        ([((1, 9), (2, 9)), ((1, 12),), ((1, 13),)], [0, 8, 12]),
        ([((1, 8), (2, 8)), ((3, 8), (2, 8))], [0, 0]),  # the same text behind another
        ([((1, 8), (2, 8), (4, 4)), ((1, 8), (2, 8), (5, 4))], [0, 16]),
    ],
)
def test_what_a_cache_without_limit_has(prompts: list[tuple[tuple[int, int], ...]], cached: list[int]) -> None:
    assert list(cached_prefixes(prompts, 4)) == cached


@pytest.mark.parametrize(("left_s", "due"), [(-0.1, 0), (0.0, 1), (0.4, 1), (0.5, 2), (9.0, 4)])
def test_tokens_are_due_at_their_deadlines_from_arrival(left_s: float, due: int) -> None:
    assert num_due(left_s, tpot_slo_s=0.5, output_tokens=4) == due


# ---- the bound ----


def test_the_bound_of_a_scene() -> None:
    """A window of 10 s. The first online request owes its 100 prompt tokens and, of four outputs, those due at 2, 3, 4
    and 5 s: 103 ms of work. The second comes at its end and owes nothing. A row computes 40 of 60 prompt tokens once
    and 20 a second time on 40 cached ones, and four outputs each, the first of them with the prompt."""
    scene = constant(
        online((0.0, 100, 4), (10.0, 100, 4)),
        [offline((40, 20, 5), (40, 20, 5))],
        profile=with_costs(*[MILLISECOND_A_TOKEN] * 3),
        ttft_slo_s=2.0,
        tpot_slo_s=1.0,
    )
    per_set_s = (60 + 20 + 2 * 4) * 1e-3
    # The cache of 256 tokens holds the prompts of a set, 80 tokens, 3.2 times: those are there when the window opens,
    # and as many wait at its end for outputs of 8 ms a set.
    left_over = 3.2 * (8e-3 * 130 / per_set_s - 10)
    tokens = (10 - 0.103 + 3.2 * 0.08) / per_set_s * 130 + left_over
    bounds = bound_tokens_per_s(scene, (0.0, 10.0))
    assert bounds == pytest.approx({"long_run": (10 - 0.103) / per_set_s * 13, "window": tokens / 10})


@pytest.mark.parametrize(("arrival_s", "takes"), [(3.0, False), (4.0, True)])
def test_what_came_before_the_window_takes_nothing_from_it(arrival_s: float, takes: bool) -> None:
    later = online((5.0, 60, 4))
    alone, both = (
        bound_tokens_per_s(constant(requests, [offline((0, 20, 5))], ttft_slo_s=1.0, tpot_slo_s=0.5), (4.0, 9.0))
        for requests in (later, [*online((arrival_s, 60, 4)), *later])
    )
    assert (both != alone) is takes


def test_without_offline_work_or_time_there_is_no_bound() -> None:
    none: Bounds = {"long_run": None, "window": None}
    assert bound_tokens_per_s(constant(online((0.0, 8, 1), (1.0, 8, 1))), (0.0, 1.0)) == none
    assert bound_tokens_per_s(constant(online((0.0, 8, 1)), [offline((0, 4, 1))]), (0.0, 0.0)) == none
    assert bound_tokens_per_s(constant(online((0.0, 8, 1))), (0.0, 1.0), kept=["nothing"]) == {**none, "in_time": None}


@pytest.mark.parametrize(
    ("kept", "tokens_taken"),
    [
        (("every token", "every token"), 10 + 3 + 10),
        (("both targets", "every token"), 10 + 3 + 10),
        (("every token", "both targets"), 10 + 3 + 10),
        (("nothing", "every token"), 10),
        (("every token", "nothing"), 10 + 3),
        (("nothing", "nothing"), 0),
    ],
)
def test_beside_what_was_kept_only_that_is_taken(kept: Sequence[TargetsKept], tokens_taken: int) -> None:
    """10 prompt tokens each, a millisecond a token. The first request owes all of its four outputs by 3.5 s: three
    decodes. The second owes one of them by the end at 10 s, with its prompt."""
    scene = constant(
        online((0.0, 10, 4), (9.0, 10, 4)),
        [offline((0, 99, 1))],
        profile=with_costs(*[MILLISECOND_A_TOKEN] * 3),
        ttft_slo_s=1.0,
        tpot_slo_s=0.5,
    )
    bounds = bound_tokens_per_s(scene, (0.0, 10.0), kept=kept)
    free = bound_tokens_per_s(scene, (0.0, 10.0), kept=["nothing"] * 2)["in_time"]
    assert bounds["in_time"] is not None
    assert free is not None
    # A row of 100 tokens computes 99, in 99 ms.
    assert bounds["in_time"] == pytest.approx(free - tokens_taken / 10 * 100 / 99)


def test_of_a_request_in_time_in_the_mean_the_last_tokens_may_come_after_the_window() -> None:
    """At 2 s three of its four outputs are due from arrival, and one in the mean."""
    scene = constant(
        online((0.0, 10, 4), (0.1, 10, 1)),
        [offline((0, 99, 1))],
        profile=with_costs(*[MILLISECOND_A_TOKEN] * 3),
        ttft_slo_s=1.0,
        tpot_slo_s=0.5,
    )
    every, mean = (
        bound_tokens_per_s(scene, (0.0, 2.0), kept=[one, "nothing"])["in_time"]
        for one in ("every token", "both targets")
    )
    assert every is not None
    assert mean is not None
    assert mean - every == pytest.approx(2 / 2 * 100 / 99)


def test_of_what_is_late_nothing_is_taken_in_a_run() -> None:
    """One slot, which the first of 30 prompts at once holds for all of its answer: most others are late."""
    requests = online(*((0.01 * k, 40, 10) for k in range(30)))
    scene = constant(
        requests,
        [offline((24, 9, 3))],
        profile=profile(num_blocks=600),
        truth=None,
        cost_model=None,
        ttft_slo_s=0.05,
        max_num_seqs=1,
    )
    result = simulate(scene).result
    bounds = result.offline.bound_tokens_per_s
    assert result.attained < 0.5
    assert bounds["window"] is not None
    assert bounds["in_time"] is not None
    assert bounds["window"] < bounds["in_time"]


@pytest.mark.parametrize("policy", ["neaptide", "fcfs"])
def test_no_run_passes_it(policy: str) -> None:
    requests = online(*((0.2 * k, 40, 10) for k in range(30)))
    scene = constant(
        requests,
        [offline(*((24, 9 + k % 7, 3 + k % 5) for k in range(200)))],
        profile=profile(num_blocks=600),
        truth=None,
        cost_model=None,
        policy=policy,
    )
    result = simulate(scene).result.offline
    bound, share = result.bound_tokens_per_s["in_time"], result.share_of_bound
    assert result.tokens_per_s is not None
    assert bound is not None
    assert share is not None
    assert result.tokens_per_s < bound
    assert share > 0.2

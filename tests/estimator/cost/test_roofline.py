"""Our iteration-time model: the formula by hand, what the fit recovers, and that more work never takes less time."""

import random
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import Regime, StepSample, mean_relative_error, raggedness
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepCost, StepFormula, gemm_knot, gemm_segment
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.estimator.recipes import build_cost_model, roofline_recipe
from tests.estimator.machines import decodes, linear_machine, measure, prefills, random_shape

COST = StepCost(
    fixed_s=1.0,
    gemm_curve_s=(2.0, 4.0),
    pair_s=0.5,
    kv_token_s=0.25,
    decode_request_s=0.125,
    prefill_request_s=3.0,
    swap_block_s=0.0625,
    weights_s=20.0,
    row_s=1.5,
    token_s=0.75,
)


def profile(source: str, cost: StepCost = COST) -> DeviceProfile:
    return DeviceProfile(
        name="made-up",
        source=source,  # type: ignore[arg-type]
        device="none",
        model="none",
        dtype="none",
        date="2026-01-01",
        commit="",
        kv_bytes_per_token=1,
        num_blocks=1,
        costs=dict.fromkeys(("prefill", "decode", "mixed"), cost),
    )


def mixed_step() -> BatchShape:
    """Ten prefill tokens (55 pairs) beside two decodes that read 40 KV tokens; three blocks are swapped."""
    shape = BatchShape()
    shape.add(10, 0)
    shape.add(1, 19)
    shape.add(1, 19)
    shape.swapped_blocks = 3
    return shape


def test_the_serial_formula_by_hand() -> None:
    model = RooflineModel.from_profile(profile("analytic"))
    compute_s = 2.0 * 12 + 1.5 * 3  # longer than the weights' 20 s
    rest_s = 1.0 + 0.75 * 12 + 0.125 * 2 + 3.0 + 0.0625 * 3
    assert model.predict(mixed_step()) == (compute_s + 0.5 * 55 + 0.25 * 40 + rest_s, 0.0)


def test_a_chunk_reads_the_context_before_it_once() -> None:
    model = RooflineModel.from_profile(profile("analytic"))
    shape = BatchShape()
    shape.add(10, 100)
    shape.add(2, 30)
    pairs = 10 * 100 + 55 + 2 * 30 + 3
    rest_s = 1.0 + 0.75 * 12 + 3.0 * 2
    assert model.predict(shape).seconds == 2.0 * 12 + 1.5 * 2 + 0.5 * pairs + 0.25 * 130 + rest_s


def test_few_tokens_wait_for_the_weights() -> None:
    model = RooflineModel.from_profile(profile("analytic"))
    assert model.predict(decodes(1, 8)).seconds == 1.0 + 20.0 + 0.25 * 8 + 0.125 + 0.75


@pytest.mark.parametrize("kappa", [0.0, 0.2, 1.0])
def test_overlap_goes_from_the_bound_to_the_serial_time(kappa: float) -> None:
    model = RooflineModel.from_profile(profile("analytic"), kappa)
    compute_s, attention_s, kv_s = 28.5, 27.5, 10.0
    rest_s = 1.0 + 9.0 + 0.25 + 3.0 + 0.1875
    serial_s = max(compute_s, 20.0) + attention_s + kv_s
    bound_s = max(compute_s + attention_s, 20.0 + kv_s)
    assert model.predict(mixed_step()).seconds == pytest.approx(bound_s + kappa * (serial_s - bound_s) + rest_s)


def test_where_weights_are_negligible_overlap_is_the_longer_plus_kappa_of_the_shorter() -> None:
    cost = StepCost(fixed_s=0.0, gemm_curve_s=(2.0, 4.0), pair_s=0.5, kv_token_s=0.25)
    model = RooflineModel.from_profile(profile("analytic", cost), 0.2)
    compute_s, memory_s = 2.0 * 12 + 0.5 * 55, 0.25 * 40
    assert model.predict(mixed_step()).seconds == pytest.approx(compute_s + 0.2 * memory_s)


def test_a_measured_profile_knows_no_overlap() -> None:
    assert RooflineModel.from_profile(profile("measured")).predict(mixed_step()).seconds > 0
    with pytest.raises(ValueError, match="is measured"):
        RooflineModel.from_profile(profile("measured"), 0.2)


def test_overlap_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overlap_kappa is 1\.5"):
        RooflineModel.from_profile(profile("analytic"), 1.5)


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0])
def test_terms_add_up_to_the_prediction(kappa: float) -> None:
    model = RooflineModel.from_profile(profile("analytic"), kappa)
    assert sum(model.terms(mixed_step())) == model.predict(mixed_step()).seconds


def test_reads_that_a_shared_prefix_saves_are_not_charged() -> None:
    model, shape = RooflineModel.from_profile(profile("analytic")), mixed_step()
    without = model.predict(shape).seconds
    shape.shared_prefix_tokens = 16
    assert model.predict(shape).seconds == without - 0.25 * 16


def test_a_measured_price_of_shared_reads_is_charged_for_each_that_is_saved() -> None:
    cost = StepCost(fixed_s=1.0, gemm_curve_s=(1.0, 2.0), pair_s=0.0, kv_token_s=0.25, shared_kv_token_s=0.125)
    model, shape = RooflineModel(dict.fromkeys(Regime, cost)), BatchShape()
    shape.add_decodes(2, 100, 50, shared_tokens=40)
    assert model.predict(shape).seconds == 1.0 + 2.0 + 0.25 * 60 + 0.125 * 40
    assert cost.scaled((1.0, 1.0, 1.0, 2.0, 1.0, 1.0)).shared_kv_token_s == 0.25


def test_the_curve_has_knots_at_powers_of_two_and_halfway_between() -> None:
    assert [gemm_knot(k) for k in range(10)] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert [gemm_segment(n) for n in range(1, 18)] == [0, 1, 2, 3, 3, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7]


def test_the_curve_is_linear_between_knots_and_beyond_the_last() -> None:
    formula = StepFormula(StepCost(fixed_s=0.0, gemm_curve_s=(1.0, 3.0, 4.0, 4.5, 6.5), pair_s=0.0, kv_token_s=0.0))
    assert [formula.gemm_s(n) for n in (0, 1, 2, 3, 4, 5, 6, 8)] == [0.0, 1.0, 3.0, 4.0, 4.5, 5.5, 6.5, 8.5]


def test_products_take_whole_tiles() -> None:
    cost = StepCost(fixed_s=0.0, gemm_curve_s=(1.0, 3.0, 4.0, 4.5, 6.5), pair_s=0.0, kv_token_s=0.0)
    formula = StepFormula(cost, tile_tokens=4)
    assert [formula.gemm_s(n) for n in (0, 1, 4, 5, 8, 9)] == [0.0, 4.5, 4.5, 8.5, 8.5, 12.5]


def test_a_curve_of_one_point_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        StepFormula(StepCost(fixed_s=0.0, gemm_curve_s=(1.0,), pair_s=0.0, kv_token_s=0.0))


def test_fit_recovers_a_machine_that_it_can_represent() -> None:
    model = RooflineModel()
    model.fit(measure(linear_machine, 0, 300))
    for regime in Regime:
        assert mean_relative_error(model, measure(linear_machine, 1, 100, regime=regime)) < 0.005


def test_fit_learns_that_mixed_steps_lose() -> None:
    machine = partial(linear_machine, mixed=1.4)
    model = RooflineModel()
    model.fit(measure(machine, 0, 300, noise=0.03))
    for regime in Regime:
        assert mean_relative_error(model, measure(machine, 1, 100, regime=regime)) < 0.03


def test_a_regime_with_few_samples_follows_the_others() -> None:
    samples = measure(linear_machine, 0, 60, 0.03, Regime.PREFILL) + measure(linear_machine, 1, 60, 0.03, Regime.DECODE)
    model = RooflineModel()
    model.fit(samples + measure(linear_machine, 2, 3, 0.03, Regime.MIXED))
    assert mean_relative_error(model, measure(linear_machine, 3, 100, regime=Regime.MIXED)) < 0.05


def test_a_regime_without_samples_gets_the_common_coefficients() -> None:
    model = RooflineModel()
    model.fit(
        measure(linear_machine, 0, 60, regime=Regime.PREFILL) + measure(linear_machine, 1, 60, regime=Regime.DECODE)
    )
    assert mean_relative_error(model, measure(linear_machine, 3, 100, regime=Regime.MIXED)) < 0.05


def test_one_stalled_step_in_ten_does_not_bend_the_fit() -> None:
    samples = measure(linear_machine, 0, 300)
    stalled = [StepSample(s.shape, s.seconds * (3.0 if i % 10 == 0 else 1.0)) for i, s in enumerate(samples)]
    model = RooflineModel()
    model.fit(stalled)
    assert mean_relative_error(model, measure(linear_machine, 1, 100)) < 0.02


def test_the_first_prefill_token_makes_no_jump_that_was_not_measured() -> None:
    model = RooflineModel()
    model.fit(measure(linear_machine, 0, 300, noise=0.03))
    for count in (1, 4, 16, 60):
        shape = decodes(count, 500)
        joined = shape.plus(2, 0)
        step = model.predict(joined).seconds - model.predict(shape).seconds
        expected = linear_machine(joined) - linear_machine(shape)
        assert abs(step - expected) < 0.06 * linear_machine(shape)


def smoothed_error_s(jump_at: int, tokens: int) -> float:
    """What the fit says of a step of ``tokens`` too much, on a machine whose time jumps by 1 behind ``jump_at``."""

    def seconds(num_tokens: int) -> float:
        return 1.0 + num_tokens / jump_at + (num_tokens > jump_at)

    sizes = [2, 3, *(size for k in range(2, 9) for size in (1 << k, 3 << k - 1))]
    model = RooflineModel()
    model.fit([StepSample(prefills(1, size), seconds(size)) for size in sizes])
    return model.predict(prefills(1, tokens)).seconds - seconds(tokens)


@pytest.mark.parametrize(
    ("jump_at", "tokens", "error_s"),
    [(4, 6, -0.0193), (4, 4, 0.0097), (64, 96, -0.254), (64, 64, 0.138)],
)
def test_a_jump_that_was_measured_is_smoothed_a_little_and_more_where_tiles_are_large(
    jump_at: int, tokens: int, error_s: float
) -> None:
    """Golden: the pull towards a straight curve is a tenth of a sample up to 16 tokens and grows with the tokens."""
    assert smoothed_error_s(jump_at, tokens) == pytest.approx(error_s, rel=0.1)


def test_steps_longer_than_all_measured_ones_are_no_cheaper_by_the_token() -> None:
    """The last tokens that were measured, 1 ms each, seem cheaper than the others, 2 ms each."""
    tokens = [number for number in range(1, 513) if number % 7 == 1 or number == 512]
    seconds = [2e-3 * number - 1e-3 * max(number - 384, 0) for number in tokens]
    model = RooflineModel()
    model.fit([StepSample(prefills(1, number), each_s) for number, each_s in zip(tokens, seconds, strict=True)])
    measured_s, longer_s = (model.predict(prefills(1, number)).seconds for number in (512, 2048))
    assert measured_s == pytest.approx(2e-3 * 512 - 1e-3 * 128, rel=0.05)
    assert longer_s >= 0.99 * 4 * measured_s


def test_fit_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="without samples"):
        RooflineModel().fit([])


@pytest.fixture(scope="module")
def noisy_model() -> RooflineModel:
    model = RooflineModel()
    model.fit(measure(linear_machine, 0, 40, noise=0.5))
    return model


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6), tokens=st.integers(2, 2000), context=st.integers(0, 4000))
def test_a_larger_chunk_never_takes_less_time(noisy_model: RooflineModel, seed: int, tokens: int, context: int) -> None:
    shape = random_shape(random.Random(seed))
    smaller, larger = shape.plus(tokens, context), shape.plus(tokens + 1, context)
    assert noisy_model.predict(larger).seconds >= noisy_model.predict(smaller).seconds * (1 - 1e-12)


@settings(max_examples=200)
@given(seed=st.integers(0, 10**6), context=st.integers(1, 4000))
def test_another_decode_never_takes_less_time(noisy_model: RooflineModel, seed: int, context: int) -> None:
    shape = random_shape(random.Random(seed), Regime.DECODE)
    assert noisy_model.predict(shape.plus(1, context)).seconds >= noisy_model.predict(shape).seconds * (1 - 1e-12)


def test_the_generic_guess_is_a_plausible_cpu() -> None:
    model = RooflineModel.generic()
    assert 1e-3 < model.predict(decodes(1, 100)).seconds < 0.1
    assert 0.05 < model.predict(prefills(1, 2048)).seconds < 5.0


def test_raggedness_of_decodes_by_hand() -> None:
    """Reads of 100 and 50 tokens: half a request is missing to two of the longest. 0.5 / 1.5."""
    shape = BatchShape()
    shape.add(1, 99)
    shape.add(1, 49)
    assert raggedness(shape) == pytest.approx(1 / 3)
    shape.add(1, 99)
    assert raggedness(shape) == pytest.approx(1 / 3)
    shape.add(1, 24)
    assert raggedness(shape) == pytest.approx(1.25 / 2.25)


@given(contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=20), more=st.integers(1, 5000))
def test_raggedness_is_zero_for_equal_decodes_and_never_falls_with_one_more(contexts: list[int], more: int) -> None:
    shape, equal = BatchShape(), BatchShape()
    for context in contexts:
        shape.add(1, context)
        equal.add(1, contexts[0])
    assert raggedness(equal) == 0.0
    assert 0.0 <= raggedness(shape) < 1.0
    assert raggedness(shape.plus(1, more)) >= raggedness(shape) - 1e-12
    assert raggedness(shape.plus(100, 10)) == raggedness(shape)


@pytest.mark.parametrize(("overlaps", "expected"), [(False, [0.012, 0.024, 0.026]), (True, [0.012, 0.012, 0.014])])
def test_a_step_waits_for_its_copies_unless_the_device_copies_beside_the_work(
    overlaps: bool, expected: list[float]
) -> None:
    cost = StepCost(0.01, (1e-3, 2e-3), pair_s=0.0, kv_token_s=0.0, swap_block_s=2e-3)
    device = msgspec.structs.replace(profile("analytic", cost), overlaps_copies=overlaps)
    model = OnlineCostModel(RooflineModel.from_profile(device)).as_it_is()
    again = build_cost_model(roofline_recipe(device, 1.0))
    for each in (model, again):
        shapes = [BatchShape(swapped_blocks=1, copied_aside_blocks=count) for count in (0, 6, 7)]
        assert [each.predict(shape).seconds for shape in shapes] == pytest.approx(expected)

"""The papers' models: formulas by hand, machines that they can represent, and what they cannot see."""

from typing import Literal

import pytest

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import StepSample, mean_relative_error
from neaptide.estimator.cost.paper_models import BrosModel, EchoModel, HygenModel
from tests.estimator.machines import decodes, measure, prefills


def echo(constant: Literal["max", "sum"]) -> EchoModel:
    model = EchoModel(constant)
    model.alpha, model.beta, model.c, model.gamma, model.delta, model.blend = 2e-7, 1e-4, 2e-2, 1e-5, 4e-5, 0.5
    return model


def chunk_and_decodes() -> BatchShape:
    """A prefill of 100 tokens (5050 pairs) beside two decodes that read 200 and 400 tokens."""
    shape = prefills(1, 100)
    shape.add(1, 199)
    shape.add(1, 399)
    return shape


def test_echo_by_hand() -> None:
    decode_s = 1e-5 * 400 + 4e-5 * 300
    added_s = 2e-7 * 10100 + 1e-4 * 100 + 2e-2
    assert echo("max").predict(prefills(1, 100)).seconds == pytest.approx(2e-2)
    assert echo("sum").predict(prefills(1, 100)).seconds == pytest.approx(added_s)
    blended_s = 0.5 * max(added_s, decode_s) + 0.5 * (added_s + decode_s)
    assert echo("sum").predict(chunk_and_decodes()).seconds == pytest.approx(blended_s)


def test_echo_as_published_does_not_see_how_many_decodes_there_are() -> None:
    model = echo("max")
    assert model.predict(decodes(1, 300)).seconds == pytest.approx(model.predict(decodes(200, 300)).seconds)


@pytest.mark.parametrize("constant", ["max", "sum"])
def test_echo_recovers_a_machine_of_its_own_form(constant: Literal["max", "sum"]) -> None:
    def machine(shape: BatchShape) -> float:
        return echo(constant).predict(shape).seconds

    model = EchoModel(constant)
    model.fit(measure(machine, 0, 300))
    assert mean_relative_error(model, measure(machine, 1, 100)) < 1e-6
    assert (model.c, model.blend) == pytest.approx((2e-2, 0.5))


def bros_machine(shape: BatchShape) -> float:
    seconds = 5e-3 + 1e-4 * shape.prefill_tokens if shape.prefill_requests else 0.0
    if shape.decode_requests:
        seconds += 3e-3 + 2e-5 * shape.decode_requests + 5e-7 * shape.decode_context_tokens
    return seconds


def test_bros_recovers_a_machine_of_its_own_form() -> None:
    model = BrosModel()
    model.fit(measure(bros_machine, 0, 100))
    assert model.coefficients == pytest.approx([5e-3, 1e-4, 3e-3, 2e-5, 5e-7], rel=1e-6)


def test_bros_hides_the_swap_behind_the_step_until_it_is_longer() -> None:
    def with_swap(blocks: int) -> BatchShape:
        shape = decodes(4, 100)
        shape.swapped_blocks = blocks
        return shape

    step_s = bros_machine(decodes(4, 100))
    swaps = [StepSample(with_swap(blocks), max(step_s, 1e-3 * blocks)) for blocks in (1, 2, 8, 16, 32, 64)]
    model = BrosModel()
    model.fit(measure(bros_machine, 0, 100) + swaps)
    assert model.predict(with_swap(2)).seconds == pytest.approx(step_s)
    assert model.predict(with_swap(48)).seconds == pytest.approx(48e-3, rel=1e-3)


def test_hygen_recovers_a_machine_of_its_own_form() -> None:
    def machine(shape: BatchShape) -> float:
        tokens, context = shape.prefill_tokens, shape.decode_context_tokens
        seconds = 2e-3 + 1e-4 * tokens + 1e-8 * tokens**2 + 5e-7 * context + 1e-12 * context**2
        return seconds + 1e-3 * shape.prefill_requests + 2e-5 * shape.decode_requests

    model = HygenModel()
    model.fit(measure(machine, 0, 200))
    assert model.coefficients == pytest.approx([2e-3, 1e-4, 5e-7, 1e-8, 1e-12, 1e-3, 2e-5], rel=1e-4)


@pytest.mark.parametrize("model", [EchoModel(), BrosModel(), HygenModel()])
def test_fit_without_samples_is_refused(model: EchoModel | BrosModel | HygenModel) -> None:
    with pytest.raises(ValueError, match="without samples"):
        model.fit([])

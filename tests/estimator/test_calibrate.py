"""Calibration at start: the executor is left as it was found, the model has learnt, and time is bounded."""

import pytest

from neaptide.engine.batch import BatchShape
from neaptide.engine.clock import VirtualClock
from neaptide.engine.interfaces import Prediction
from neaptide.estimator.calibrate import MAX_TOTAL_S, calibration_shapes, warm_up
from neaptide.estimator.iteration_time import LinearCostModel
from neaptide.estimator.sim_executor import SimExecutor


class Machine:
    """A linear machine; ``slow`` stretches everything."""

    def __init__(self, slow: float = 1.0) -> None:
        self._slow = slow

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(self._slow * (2e-3 + 1e-4 * shape.num_tokens + 2e-7 * shape.decode_context_tokens), 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        raise AssertionError("the executor's own model does not learn")


def calibrate(machine: Machine, num_blocks: int = 2048) -> tuple[LinearCostModel, VirtualClock, int]:
    clock, model = VirtualClock(), LinearCostModel()
    executor = SimExecutor(num_blocks, machine, clock, vocab_size=100)
    steps = list(warm_up(executor, model, clock, 16, calibration_shapes(2048, 256, 8192)))
    return model, clock, len(steps)


def test_the_model_predicts_the_machine_after_calibration() -> None:
    machine = Machine()
    model, _, steps = calibrate(machine)
    assert steps == 30
    shape = BatchShape()
    for context in (100, 200, 300):
        shape.add(1, context)
    shape.add(200, 0)
    assert model.predict(shape).seconds == pytest.approx(machine.predict(shape).seconds, rel=0.1)


def test_a_slow_machine_is_not_calibrated_for_long() -> None:
    _, clock, steps = calibrate(Machine(slow=100.0))
    assert steps < 30
    assert clock.now() < MAX_TOTAL_S + 20.0


def test_shapes_that_do_not_fit_into_the_cache_are_left_out() -> None:
    _, _, steps = calibrate(Machine(), num_blocks=40)
    assert 0 < steps < 30

"""What the models share."""

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import ConstantCostModel, Regime, StepSample, mean_relative_error, regime_of
from tests.estimator.machines import decodes, prefills


def test_regimes() -> None:
    assert regime_of(prefills(1, 10)) is Regime.PREFILL
    assert regime_of(decodes(3, 10)) is Regime.DECODE
    assert regime_of(decodes(3, 10).plus(10, 0)) is Regime.MIXED
    assert regime_of(BatchShape()) is Regime.DECODE


def test_the_error_is_relative_to_the_measured_time() -> None:
    samples = [StepSample(decodes(1, 10), 4.0), StepSample(decodes(1, 10), 0.5)]
    assert mean_relative_error(ConstantCostModel(1.0), samples) == (0.75 + 1.0) / 2

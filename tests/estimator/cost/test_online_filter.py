"""The filter behind the online correction against its textbook form: a part per term, and one per term and regime."""

import random

import numpy as np
import pytest

from neaptide.engine.arrays import FloatArray
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost import online_fit
from neaptide.estimator.cost.iteration_time import Regime, regime_of
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import NUM_TERMS
from tests.estimator.machines import linear_machine, random_shape

SIZE = 1 + NUM_TERMS * (1 + len(Regime))


class Textbook:
    """Parts: of everything, of each term, of each term in each regime. Kalman's equations as they stand in a book."""

    def __init__(self, base: RooflineModel) -> None:
        self._base = base
        variance = np.full(SIZE, online_fit.PRIOR_OWN**2)
        variance[1 : 1 + NUM_TERMS] = online_fit.PRIOR_TERM**2
        variance[0] = online_fit.PRIOR_COMMON**2
        self._transition = np.eye(SIZE) * (1.0 - 1.0 / online_fit.MEMORY_STEPS)
        self._transition[0, 0] = 1.0
        self._parts, self._covariance = np.zeros(SIZE), np.diag(variance)
        self._growth = self._covariance - self._transition @ self._covariance @ self._transition.T
        self._trend = 0.0

    def terms_s(self, shape: BatchShape) -> FloatArray:
        """[terms] of the predicted time."""
        return np.exp(self._of_terms(shape) @ self._parts) * np.array(self._base.terms(shape))

    def _of_terms(self, shape: BatchShape) -> FloatArray:
        """[terms, parts] 1 where a part counts for the term."""
        number, counts = list(Regime).index(regime_of(shape)), np.zeros((NUM_TERMS, SIZE))
        counts[:, 0] = 1.0
        counts[:, 1 : 1 + NUM_TERMS] = np.eye(NUM_TERMS)
        own = 1 + NUM_TERMS * (1 + number)
        counts[:, own : own + NUM_TERMS] = np.eye(NUM_TERMS)
        return counts

    def observe(self, shape: BatchShape, seconds: float) -> None:
        terms_s = self.terms_s(shape)
        error = np.log(seconds / terms_s.sum())
        slope = terms_s / terms_s.sum() @ self._of_terms(shape)
        bounded = np.clip(error, -online_fit.MAX_TREND_ERROR, online_fit.MAX_TREND_ERROR)
        self._trend += online_fit.TREND_RATE * (bounded - self._trend)
        growth = self._growth.copy()
        growth[0, 0] = online_fit.COMMON_DRIFT**2 + (online_fit.TREND_DRIFT * self._trend) ** 2
        self._parts = self._transition @ self._parts
        self._covariance = self._transition @ self._covariance @ self._transition.T + growth
        variance = slope @ self._covariance @ slope + online_fit.NOISE**2
        limit = online_fit.OUTLIER * np.sqrt(variance)
        gain = self._covariance @ slope / variance
        self._parts = self._parts + gain * np.clip(error, -limit, limit)
        self._covariance = self._covariance - np.outer(gain, slope @ self._covariance)


@pytest.mark.parametrize("kappa", [1.0, 0.4])
def test_predictions_are_those_of_parts_per_term_and_per_term_and_regime(kappa: float) -> None:
    rng, base = random.Random(5), RooflineModel(overlap_kappa=kappa)
    model, textbook = OnlineCostModel(base), Textbook(base)
    for step in range(1500):
        regime = rng.choice(list(Regime)) if step % 500 > 100 else Regime.DECODE
        shape, slow = random_shape(rng, regime), 1.5 if step > 700 else 1.0
        for seen in (shape, *(random_shape(rng, each) for each in Regime)):
            assert model.predict(seen).seconds == pytest.approx(float(textbook.terms_s(seen).sum()), rel=1e-11)
        seconds = slow * linear_machine(shape, mixed=1.15) * rng.lognormvariate(0.0, 0.05)
        model.observe(shape, seconds)
        textbook.observe(shape, seconds)

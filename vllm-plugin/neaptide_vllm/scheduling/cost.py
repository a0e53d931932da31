"""The cost model inside vLLM: a profile if the operator gives one, else a guess that the server's own steps replace."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from neaptide.engine.interfaces import Prediction
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import StepSample
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel

FITS_AT = (100, 400, 1600)
"""Measured steps after which the coefficients are fitted anew. In between every step corrects them."""
REPEATED = 400
"""Last steps that correct a new fit, so that its first errors weigh no more than later ones."""


class LearnedCostModel:
    """Implements ``CostModel``.

    Args:
        background: where fits run, which take a few tenths of a second; None runs them at once.
        profiled: step times of a profile. Measured steps correct them and never replace them.
    """

    def __init__(self, background: Executor | None = None, profiled: RooflineModel | None = None) -> None:
        self._model = OnlineCostModel(profiled or RooflineModel.generic())
        self._fits_at = FITS_AT if profiled is None else ()
        self._samples: deque[StepSample] = deque(maxlen=FITS_AT[-1])
        self._background = background
        self._fit: Future[OnlineCostModel] | None = None
        self.num_observed = 0
        """Measured steps."""

    @property
    def coverage(self) -> float:
        """Fraction of steps that took at most the prediction plus margin."""
        return self._model.coverage

    @property
    def mape(self) -> float:
        """Mean relative error of the predictions since the last fit."""
        return self._model.mape

    def predict(self, shape: BatchShape) -> Prediction:
        return self._model.predict(shape)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        self._model.observe(shape, seconds)
        self.num_observed += 1
        if self._fit is not None and self._fit.done():
            self._model, self._fit = self._fit.result(), None
        if not self._fits_at or self.num_observed > self._fits_at[-1]:
            return
        self._samples.append(StepSample(shape, seconds))
        if self.num_observed in self._fits_at:
            samples = list(self._samples)
            if self._background is None:
                self._model = _fitted(samples)
            else:
                self._fit = self._background.submit(_fitted, samples)


def _fitted(samples: Sequence[StepSample]) -> OnlineCostModel:
    base = RooflineModel.generic()
    base.fit(samples)
    model = OnlineCostModel(base)
    for sample in samples[-REPEATED:]:
        model.observe(sample.shape, sample.seconds)
    return model

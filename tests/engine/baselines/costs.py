"""A cost model whose step times can be added up by hand."""

from neaptide.engine.interfaces import Prediction
from neaptide.engine.steps.plan import BatchShape


class PerTokenCost:
    """10 ms, and 1 ms for every token computed, prompt or decode."""

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction((10 + shape.num_tokens) / 1000, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        pass

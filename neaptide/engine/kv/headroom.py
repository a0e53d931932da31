"""Fixed reservation of blocks for online work."""


class FixedHeadroom:
    """Reserves a fixed share of the pool, or the blocks that online work holds now if those are more.

    Implements ``HeadroomPredictor``; the forecasting ones are in ``neaptide.estimator.forecast``.
    """

    def __init__(self, num_blocks: int, ratio: float) -> None:
        self._reserved_blocks = round(num_blocks * ratio)
        self._online_held_blocks = 0

    def observe(self, now_s: float, online_held_blocks: int) -> None:
        self._online_held_blocks = online_held_blocks

    def observe_arrival(self, now_s: float) -> None:
        pass

    def headroom_blocks(self, now_s: float) -> int:
        return max(self._reserved_blocks, self._online_held_blocks)

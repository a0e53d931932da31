"""The memory that online requests will need until they end, as far as it can be foreseen."""

import numpy as np

from neaptide.engine.arrays import FloatArray, largest


def most_held_tokens(held_tokens: int, own_tokens: FloatArray, left_tokens: FloatArray) -> int:
    """The most tokens that some requests will hold at once if all go on together until each ends.

    Args:
        held_tokens: what they hold now, shared tokens counted once.
        own_tokens: [requests] what the end of each frees of it.
        left_tokens: [requests] what each will still get.
    """
    order = left_tokens.argsort()
    left, own = left_tokens[order], own_tokens[order]
    # When one ends, those with less left have ended, and all others have grown by as much as it.
    num_running = np.arange(len(left), 0, -1)
    freed = own.cumsum() - own
    return held_tokens + largest(left * num_running - freed)

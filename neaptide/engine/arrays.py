"""Types of the engine's numpy arrays."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
TokenArray = npt.NDArray[np.int32]
"""Token ids."""
BlockArray = npt.NDArray[np.int32]
"""Ids of KV blocks."""

ONE: IntArray = np.array(1)
"""Array constant for the columns of every step. A Python int makes an operation on a few hundred values take twice as
long."""


def smallest(values: FloatArray) -> float:
    """Smallest of at least one value. ``np.minimum.reduce`` takes four times as long for a few hundred values."""
    return float(values.item(values.argmin()))


def largest(values: IntArray | FloatArray) -> int:
    """Largest of at least one value; see ``smallest``."""
    return int(values[values.argmax()])

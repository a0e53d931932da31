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
"""For columns of every step: a number of Python's takes an operation on some hundred of numpy's as long again."""


def smallest(values: FloatArray) -> float:
    """Of at least one. ``np.minimum.reduce`` takes four times as long for some hundred values, and every step asks."""
    return float(values[values.argmin()])


def largest(values: IntArray) -> int:
    """As ``smallest``, the largest."""
    return int(values[values.argmax()])

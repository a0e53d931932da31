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

"""Linear layers with weights packed once."""

from neaptide.kernels.linear.native import DTYPES, PackedLinear, multiplies_pairs

__all__ = ["DTYPES", "PackedLinear", "multiplies_pairs"]

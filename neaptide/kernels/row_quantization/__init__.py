"""Products of rows of activations, each quantized to 8 bits with a scale and zero point, with 8-bit weights."""

from neaptide.kernels.row_quantization.product import DTYPES, ByteProduct

__all__ = ["DTYPES", "ByteProduct"]

"""Rows of activations as 8-bit numbers with a scale and zero point each, and sums of their products back as floats."""

import logging

from neaptide.kernels.native import CompileError
from neaptide.kernels.row_quantization.native import NativeRowQuantizer
from neaptide.kernels.row_quantization.product import ByteProduct
from neaptide.kernels.row_quantization.reference import Quantized, RowQuantizer

__all__ = ["ByteProduct", "NativeRowQuantizer", "Quantized", "RowQuantizer", "row_quantizer"]

logger = logging.getLogger(__name__)


def row_quantizer(kernels: str = "auto") -> RowQuantizer:
    """The C quantizer, or torch's if ``kernels`` is ``torch`` or there is no compiler."""
    if kernels != "torch":
        try:
            return NativeRowQuantizer()
        except CompileError as error:
            logger.warning("activations are quantized by torch, which is slower: %s", error)
    return RowQuantizer()

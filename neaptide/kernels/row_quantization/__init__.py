"""Rows of activations as 8-bit numbers with a scale and a zero for each, and back from sums of products of such."""

import logging

from neaptide.kernels.native import CompileError
from neaptide.kernels.row_quantization.native import NativeRowQuantizer
from neaptide.kernels.row_quantization.product import ByteProduct
from neaptide.kernels.row_quantization.reference import Quantized, RowQuantizer

__all__ = ["ByteProduct", "NativeRowQuantizer", "Quantized", "RowQuantizer", "row_quantizer"]

logger = logging.getLogger(__name__)


def row_quantizer(kernels: str = "auto") -> RowQuantizer:
    """In C, unless ``kernels`` is ``torch`` or there is no compiler."""
    if kernels != "torch":
        try:
            return NativeRowQuantizer()
        except CompileError as error:
            logger.warning("activations are quantized by torch, which is slower: %s", error)
    return RowQuantizer()

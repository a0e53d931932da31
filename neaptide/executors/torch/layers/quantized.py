"""8-bit products on a CPU (W8A8), with a weight scale per output and an activation scale per token.

Weights are symmetric, from -127 to 127. Activations use 0 to 255 with a zero point, because oneDNN has no fast path for
signed activations.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from neaptide.engine.config import ExecutorConfig
from neaptide.executors.torch.layers.products import ROUNDED_UP, TILE_ROWS, Product, is_small
from neaptide.kernels.row_quantization import ByteProduct, NativeRowQuantizer, RowQuantizer, row_quantizer

QUANTIZATIONS = ("none", "w8a8")
_MOST = 127


def quantized_product(weight: Tensor, bias: Tensor | None, quantizer: RowQuantizer) -> Product:
    """``x W^T + b`` with 8-bit error: in C if the quantizer is in C and the processor multiplies bytes, else by oneDNN.

    Arguments and errors are those of ``QuantizedProduct``.
    """
    if isinstance(quantizer, NativeRowQuantizer) and ByteProduct.takes(weight.dtype, weight.shape[1]):
        return ByteProduct(*quantize_weight(weight), bias)
    return QuantizedProduct(weight, bias, quantizer)


class QuantizedProduct:
    """``x W^T + b`` with 8-bit error, by oneDNN.

    Args:
        weight: [out_features, in_features] of any float type; copied.
        bias: [out_features].
        quantizer: of activations.

    Raises:
        RuntimeError, AttributeError: torch's operators, which are not public, have changed.
    """

    __slots__ = ("_bias", "_of_ones", "_packed", "_quantizer", "_rounded_up", "_scales", "_zeros", "out_features")

    is_noted: ClassVar[bool] = False

    def __init__(self, weight: Tensor, bias: Tensor | None, quantizer: RowQuantizer) -> None:
        self.out_features = weight.shape[0]
        self._quantizer, self._rounded_up = quantizer, ROUNDED_UP[is_small(weight)]
        numbers, self._scales = quantize_weight(weight)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)
        self._of_ones = numbers.sum(dim=1, dtype=torch.int64).float() * self._scales
        self._bias = None if bias is None else bias.float()
        self._packed = torch.ops.onednn.qlinear_prepack(numbers, None)

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        self._write(x, out, adds=False)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        self._write(x, residual, adds=True)

    def _write(self, x: Tensor, out: Tensor, *, adds: bool) -> None:
        if x.shape[0] <= TILE_ROWS:
            self._write_tile(x, out, adds=adds)
            return
        for rows, part in zip(torch.split(out, TILE_ROWS), torch.split(x, TILE_ROWS), strict=True):
            self._write_tile(part, rows, adds=adds)

    def _write_tile(self, x: Tensor, out: Tensor, *, adds: bool) -> None:
        """Quantizes, multiplies and restores one tile. Rows after those of ``x`` are undefined and dropped."""
        quantized = self._quantizer.quantize(x, self._rounded_up[x.shape[0]])
        numbers, packed, scales, zeros = quantized.numbers, self._packed, self._scales, self._zeros
        sums = torch.ops.onednn.qlinear_pointwise(
            numbers, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        self._quantizer.restore(sums, quantized, self._of_ones, self._bias, out, adds=adds)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [outputs, inputs] as int8 with a fp32 scale per output: ``weight ~ numbers * scales``."""
    values = weight.float()
    scales = values.abs().amax(dim=1).div_(_MOST).clamp_min_(1e-30)
    return (values / scales.unsqueeze(1)).round_().to(torch.int8), scales


def quantizer_of(config: ExecutorConfig, device: torch.device) -> RowQuantizer | None:
    """The activation quantizer, tried on this machine; None if quantization is off.

    Raises:
        ValueError: it does not work here, or not with another setting. The message is one line.
    """
    name = config.quantization
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization {name!r} is not supported: {', '.join(QUANTIZATIONS)}")
    if name == "none":
        return None
    if device.type != "cpu":
        raise ValueError(f"quantization {name!r} needs a CPU, not device {device.type!r}")
    if config.batch_invariant:
        raise ValueError(f"quantization {name!r} cannot be combined with batch_invariant, which computes in float32")
    quantizer = row_quantizer(config.cpu_kernels)
    try:
        has_overflown = overflows(quantized_product, quantizer)
    except (RuntimeError, AttributeError) as error:
        raise ValueError(f"quantization {name!r} is not available: {str(error).splitlines()[0]}") from error
    if has_overflown:
        raise ValueError(f"quantization {name!r} is not available: this CPU's 8-bit products overflow")
    return quantizer


def overflows(make: Callable[[Tensor, Tensor | None, RowQuantizer], Product], quantizer: RowQuantizer) -> bool:
    """Whether the largest numbers overflow in these products.

    Without 8-bit products (AVX2 alone) oneDNN adds pairs of them in 16 bits.
    """
    found = make(torch.ones(16, 64), None, quantizer)(torch.ones(2, 64))
    return float((found - 64.0).abs().max()) > 0.01

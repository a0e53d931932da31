"""8-bit products on a CPU (W8A8), with a weight scale per output and an activation scale per token.

Weights are symmetric, from -127 to 127. Activations use 0 to 255 with a zero point.
"""

import torch
from torch import Tensor

from neaptide.engine.config import ExecutorConfig
from neaptide.kernels.native import CompileError
from neaptide.kernels.row_quantization import DTYPES, ByteProduct

QUANTIZATIONS = ("none", "w8a8")
_MOST = 127


def quantized_product(weight: Tensor, bias: Tensor | None) -> ByteProduct:
    """``x W^T + b`` with 8-bit error.

    Args:
        weight: [out_features, in_features] of any float type; copied.
        bias: [out_features].

    Raises:
        CompileError: the C source does not compile here.
    """
    return ByteProduct(*quantize_weight(weight), bias)


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [outputs, inputs] as int8 with a fp32 scale per output: ``weight ~ numbers * scales``."""
    values = weight.float()
    scales = values.abs().amax(dim=1).div_(_MOST).clamp_min_(1e-30)
    return (values / scales.unsqueeze(1)).round_().to(torch.int8), scales


def quantizes(config: ExecutorConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether layers may be quantized, after a trial on this machine.

    Args:
        config: names the quantization.
        dtype: of activations.
        device: of weights and activations.

    Raises:
        ValueError: it does not work here, or not with another setting. The message is one line.
    """
    name = config.quantization
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization {name!r} is not supported: {', '.join(QUANTIZATIONS)}")
    if name == "none":
        return False
    if device.type != "cpu":
        raise ValueError(f"quantization {name!r} needs a CPU, not device {device.type!r}")
    if config.batch_invariant:
        raise ValueError(f"quantization {name!r} cannot be combined with batch_invariant, which computes in float32")
    if config.cpu_kernels == "torch":
        raise ValueError(f"quantization {name!r} needs C kernels, not cpu_kernels = 'torch'")
    if dtype not in DTYPES:
        raise ValueError(
            f"quantization {name!r} needs dtype float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
        )
    try:
        if not ByteProduct.takes(dtype, 1):
            raise ValueError(f"quantization {name!r} is not available: this CPU has neither AVX2 nor AVX512_VNNI")
    except CompileError as error:
        raise ValueError(f"quantization {name!r} is not available: {error}") from error
    if _overflows():
        raise ValueError(f"quantization {name!r} is not available: 8-bit products overflow here")
    return True


def _overflows() -> bool:
    """Whether products of the largest numbers are wrong."""
    found = quantized_product(torch.ones(16, 64), None)(torch.ones(2, 64))
    return float((found - 64.0).abs().max()) > 0.01

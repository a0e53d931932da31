"""Row quantization in C (``quantize.c``), for fp32 and bf16 on CPUs with a compiler: two passes instead of ten."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from neaptide.kernels.native import load_library, openmp_parallel
from neaptide.kernels.row_quantization.reference import Quantized, RowQuantizer

SOURCE = Path(__file__).with_name("quantize.c")
DTYPES = (torch.float32, torch.bfloat16)


class QuantizationJob(ctypes.Structure):
    """``job_t`` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y", "scales", "zeros", "of_ones", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "x_stride", "y_stride", "is_bfloat16", "adds")),
        ("num_threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("next", ctypes.c_int64),
    ]


class NativeRowQuantizer(RowQuantizer):
    """Quantizes supported tensors in C and others in torch.

    Raises:
        CompileError: the source does not compile here.
    """

    def __init__(self) -> None:
        library = load_library(SOURCE)
        library.neaptide_quantize_job_bytes.restype = ctypes.c_int64
        assert library.neaptide_quantize_job_bytes() == ctypes.sizeof(QuantizationJob)
        self._quantize, self._restore = library.neaptide_quantize_rows, library.neaptide_restore_rows
        self._quantize.restype, self._restore.restype = None, None
        self._parallel = openmp_parallel()

    def quantize(self, x: Tensor, num_rows: int) -> Quantized:
        rows, size = x.shape
        if not _takes(x):
            return super().quantize(x, num_rows)
        numbers = torch.empty(num_rows, size, dtype=torch.uint8)
        scales, zeros = torch.empty(2, rows).unbind(0)
        job = QuantizationJob(
            x=x.data_ptr(),
            y=numbers.data_ptr(),
            scales=scales.data_ptr(),
            zeros=zeros.data_ptr(),
            rows=rows,
            size=size,
            x_stride=x.stride(0),
            y_stride=size,
            is_bfloat16=x.dtype == torch.bfloat16,
            num_threads=torch.get_num_threads(),
            parallel=self._parallel,
        )
        self._quantize(ctypes.byref(job))
        return Quantized(numbers, scales, zeros)

    def restore(
        self, sums: Tensor, quantized: Quantized, of_ones: Tensor, bias: Tensor | None, out: Tensor, *, adds: bool
    ) -> None:
        rows, size = out.shape
        plain = sums.is_contiguous() and sums.dtype == torch.float32 and sums.shape[0] >= rows == len(quantized.scales)
        fits = sums.shape[1] == len(of_ones) == size and (bias is None or len(bias) == size)
        if not (plain and fits and _takes(out)):
            super().restore(sums, quantized, of_ones, bias, out, adds=adds)
            return
        job = QuantizationJob(
            x=sums.data_ptr(),
            y=out.data_ptr(),
            scales=quantized.scales.data_ptr(),
            zeros=quantized.zeros.data_ptr(),
            of_ones=of_ones.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            rows=rows,
            size=size,
            y_stride=out.stride(0),
            is_bfloat16=out.dtype == torch.bfloat16,
            adds=adds,
            num_threads=torch.get_num_threads(),
            parallel=self._parallel,
        )
        self._restore(ctypes.byref(job))


def _takes(rows: Tensor) -> bool:
    return rows.dtype in DTYPES and rows.stride(1) == 1

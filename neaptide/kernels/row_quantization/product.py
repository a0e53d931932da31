"""Products of 8-bit numbers in C (``quantize.c``): one call quantizes rows, multiplies and restores."""

import ctypes
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from neaptide.kernels.native import load_library, openmp_parallel
from neaptide.kernels.recording import call, empty, scratch

SOURCE = Path(__file__).with_name("quantize.c")
DTYPES = (torch.float32, torch.bfloat16)


class _ProductJob(ctypes.Structure):
    """``product_t`` of the C source, whose first part is ``job_t``."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "y", "scales", "zeros", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "x_stride", "y_stride", "is_bfloat16", "adds")),
        ("num_threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        ("next", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("packed", "weight_scales", "weight_sums", "out")),
        *((name, ctypes.c_int64) for name in ("outputs", "out_stride")),
        ("scratch", ctypes.c_void_p),
    ]


def _library() -> ctypes.CDLL:
    library = load_library(SOURCE)
    for name in ("job_bytes", "scratch_floats", "packed_bytes", "takes"):
        getattr(library, f"neaptide_product_{name}").restype = ctypes.c_int64
    library.neaptide_product.restype = library.neaptide_product_pack.restype = None
    assert library.neaptide_product_job_bytes() == ctypes.sizeof(_ProductJob)
    return library


class ByteProduct:
    """``x (scales numbers)^T + b`` with the rows of x rounded to 8 bits. Sums are exact; results are rounded once.

    Args:
        numbers: [out_features, in_features] int8, at least -127; copied.
        scales: [out_features] fp32.
        bias: [out_features] of any float type.

    Raises:
        CompileError: the source does not compile here.
    """

    __slots__ = ("_bias", "_job", "_library", "_packed", "_scales", "_scratch_floats", "_sums")

    is_noted: ClassVar[bool] = True

    def __init__(self, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._library = library = _library()
        numbers = numbers.contiguous()
        outputs, size = numbers.shape
        sizes = ctypes.c_int64(outputs), ctypes.c_int64(size)
        self._packed = torch.empty(library.neaptide_product_packed_bytes(*sizes), dtype=torch.int8)
        packed = ctypes.c_void_p(self._packed.data_ptr())
        library.neaptide_product_pack(ctypes.c_void_p(numbers.data_ptr()), *sizes, packed)
        self._scratch_floats = library.neaptide_product_scratch_floats(ctypes.c_int64(size))
        self._scales, self._sums = scales.contiguous(), numbers.sum(dim=1, dtype=torch.int32)
        self._bias = None if bias is None else bias.float().contiguous()
        self._job = _ProductJob(
            bias=None if self._bias is None else self._bias.data_ptr(),
            size=size,
            parallel=openmp_parallel(),
            packed=self._packed.data_ptr(),
            weight_scales=self._scales.data_ptr(),
            weight_sums=self._sums.data_ptr(),
            outputs=outputs,
            out_stride=outputs,
        )

    @staticmethod
    def takes(dtype: torch.dtype, in_features: int) -> bool:
        """Whether such rows are supported here. The processor must have AVX2 or AVX512_VNNI.

        Raises:
            CompileError: the source does not compile here.
        """
        return dtype in DTYPES and bool(_library().neaptide_product_takes(ctypes.c_int64(in_features)))

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] fp32 or bf16 -> [rows, out_features] of the same type.

        Raises:
            ValueError: wrong shape or type. Nothing has been read.
        """
        out = empty((x.shape[0], self._job.outputs), x.dtype)
        self._run(x, out, adds=False)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the product to ``residual``.

        Raises:
            ValueError: wrong shape or type. Nothing has been read.
        """
        self._run(x, residual, adds=True)

    def _run(self, x: Tensor, out: Tensor, *, adds: bool) -> None:
        job, rows = self._job, x.shape[0]
        if x.dim() != 2 or x.shape[1] != job.size or x.dtype not in DTYPES or x.stride(1) != 1:
            raise ValueError(f"rows of shape {tuple(x.shape)}, {x.dtype} do not match the weight's input")
        if out.shape != (rows, job.outputs) or out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(f"a sum of shape {tuple(out.shape)}, {out.dtype} is not the weight's output")
        room = scratch(rows, self._scratch_floats)
        job.x, job.x_stride, job.rows, job.is_bfloat16 = x.data_ptr(), x.stride(0), rows, x.dtype == torch.bfloat16
        job.out, job.adds, job.scratch, job.num_threads = out.data_ptr(), adds, room.data_ptr(), torch.get_num_threads()
        call(self._library.neaptide_product, job, x, out, room, self._packed, self._scales, self._sums)

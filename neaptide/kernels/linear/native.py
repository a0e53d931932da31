"""Linear layers in C (``linear.c``) with weights packed once, for fp32 or bf16 rows on CPUs with a compiler."""

import ctypes
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from neaptide.kernels.native import load_library, openmp_parallel
from neaptide.kernels.recording import call, empty, scratch

SOURCE = Path(__file__).with_name("linear.c")
DTYPES = (torch.float32, torch.bfloat16)


class _LinearJob(ctypes.Structure):
    """``job_t`` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "bias", "y", "packed", "narrow_x", "narrow_y")),
        *((name, ctypes.c_int64) for name in ("rows", "k", "n", "x_stride", "y_stride", "is_bfloat16", "adds")),
        *((name, ctypes.c_int64) for name in ("in_pairs", "num_threads")),
        ("parallel", ctypes.c_void_p),
        ("next", ctypes.c_int64),
    ]


def multiplies_pairs() -> bool:
    """Whether this processor multiplies pairs of bf16 numbers, so that bf16 rows are not widened first.

    Raises:
        CompileError: the source does not compile here.
    """
    return _takes_pairs(_library(), 2)


def _takes_pairs(library: ctypes.CDLL, in_features: int) -> bool:
    return bool(library.neaptide_linear_takes_pairs(ctypes.c_int64(in_features)))


def _library() -> ctypes.CDLL:
    library = load_library(SOURCE)
    for name in ("padded", "job_bytes", "takes_pairs"):
        getattr(library, f"neaptide_linear_{name}").restype = ctypes.c_int64
    for name in ("neaptide_linear", "neaptide_linear_pack", "neaptide_linear_pack_pairs"):
        getattr(library, name).restype = None
    assert library.neaptide_linear_job_bytes() == ctypes.sizeof(_LinearJob)
    return library


class PackedLinear:
    """``y = x W^T + b``, summed in fp32.

    A weight that holds only bf16 values is stored exactly in half the memory. bf16 results are rounded once.

    Where the processor multiplies pairs of bf16 numbers, a bf16 weight accepts only bf16 rows. On other processors,
    rows are widened to fp32 first.

    Args:
        weight: [out_features, in_features] fp32 or bf16; copied.
        bias: [out_features] fp32 or bf16.

    Raises:
        CompileError: the source does not compile here.
    """

    __slots__ = ("_bias", "_dtypes", "_job", "_library", "_packed", "in_features", "out_features")

    is_noted: ClassVar[bool] = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._library = library = _library()
        self.out_features, self.in_features = weight.shape
        in_pairs = weight.dtype == torch.bfloat16 and _takes_pairs(library, self.in_features)
        self._dtypes = (torch.bfloat16,) if in_pairs else DTYPES
        weight = weight.contiguous() if in_pairs else weight.float().contiguous()
        is_bfloat16 = in_pairs or torch.equal(weight, weight.bfloat16().float())
        padded = library.neaptide_linear_padded(ctypes.c_int64(self.out_features))
        self._packed = torch.empty(padded * self.in_features, dtype=torch.bfloat16 if is_bfloat16 else torch.float32)
        source, packed = ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(self._packed.data_ptr())
        sizes = ctypes.c_int64(self.out_features), ctypes.c_int64(self.in_features)
        if in_pairs:
            library.neaptide_linear_pack_pairs(source, *sizes, packed)
        else:
            library.neaptide_linear_pack(source, *sizes, ctypes.c_int64(is_bfloat16), packed)
        self._bias = None if bias is None else bias.float().contiguous()
        self._job = _LinearJob(
            packed=self._packed.data_ptr(),
            k=self.in_features,
            n=self.out_features,
            y_stride=self.out_features,
            is_bfloat16=is_bfloat16,
            in_pairs=in_pairs,
            parallel=openmp_parallel(),
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weight, in bytes."""
        return self._packed.numel() * self._packed.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] fp32 or bf16 -> [rows, out_features] of the same type.

        Raises:
            ValueError: wrong shape or type. Nothing has been read.
        """
        y = empty((x.shape[0], self.out_features), x.dtype)
        self._run(x, y, None if self._bias is None else self._bias.data_ptr(), adds=False)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += x W^T + b`` in place.

        Raises:
            ValueError: wrong shape or type. Nothing has been read.
        """
        is_plain = residual.dtype == x.dtype and residual.is_contiguous()
        if residual.shape != (x.shape[0], self.out_features) or not is_plain:
            raise ValueError(f"a sum of shape {tuple(residual.shape)}, {residual.dtype} is not the weight's output")
        bias, in_place = self._bias, x.dtype == torch.float32  # bf16 sums take the bias before they are rounded
        self._run(x, residual, None if bias is None or in_place else bias.data_ptr(), adds=True)
        if bias is not None and in_place:
            residual.add_(bias)

    def _run(self, x: Tensor, y: Tensor, bias: int | None, *, adds: bool) -> None:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype not in self._dtypes or x.stride(1) != 1:
            raise ValueError(f"rows of shape {tuple(x.shape)}, {x.dtype} do not match the weight's input")
        job, rows = self._job, x.shape[0]
        job.num_threads = torch.get_num_threads()
        job.x_stride, job.rows, job.bias, job.adds = x.stride(0), rows, bias, adds
        if job.in_pairs:
            job.narrow_x, job.narrow_y = x.data_ptr(), y.data_ptr()
        elif x.dtype == torch.bfloat16:
            wide = scratch(rows, self.in_features + self.out_features)
            job.narrow_x, job.narrow_y, job.x = x.data_ptr(), y.data_ptr(), wide.data_ptr()
        else:
            job.narrow_x, job.x, job.y = None, x.data_ptr(), y.data_ptr()
        call(self._library.neaptide_linear, job, x, y, self._packed)

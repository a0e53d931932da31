"""Linear layers in C (``linear.c``) with weights packed once, for fp32 on CPUs with a compiler."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from neaptide.kernels.native import load_library, openmp_parallel

SOURCE = Path(__file__).with_name("linear.c")


class _Job(ctypes.Structure):
    """``job_t`` of the source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "bias", "y", "packed")),
        *((name, ctypes.c_int64) for name in ("rows", "k", "n", "x_stride", "y_stride", "is_bfloat16", "adds")),
        ("scratch", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
        ("parallel", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("next", "arrived")),
    ]


class PackedLinear:
    """``y = x W^T + b`` in fp32. A weight whose every number is a bf16 one is kept in half the memory, exactly.

    Args:
        weight: [out_features, in_features] fp32; not needed any more afterwards.
        bias: [out_features] fp32.

    Raises:
        CompileError: the source cannot be compiled here.
    """

    __slots__ = ("_bias", "_job", "_library", "_packed", "_scratch", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        library = load_library(SOURCE)
        library.neaptide_linear_padded.restype = ctypes.c_int64
        library.neaptide_linear_scratch_floats.restype = ctypes.c_int64
        library.neaptide_linear_job_bytes.restype = ctypes.c_int64
        library.neaptide_linear.restype, library.neaptide_linear_pack.restype = None, None
        assert library.neaptide_linear_job_bytes() == ctypes.sizeof(_Job)
        self._library = library
        self.out_features, self.in_features = weight.shape
        weight = weight.contiguous()
        is_bfloat16 = torch.equal(weight, weight.bfloat16().float())
        padded = library.neaptide_linear_padded(ctypes.c_int64(self.out_features))
        self._packed = torch.empty(padded * self.in_features, dtype=torch.bfloat16 if is_bfloat16 else torch.float32)
        library.neaptide_linear_pack(
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_int64(self.out_features),
            ctypes.c_int64(self.in_features),
            ctypes.c_int64(is_bfloat16),
            ctypes.c_void_p(self._packed.data_ptr()),
        )
        self._bias = None if bias is None else bias.contiguous()
        self._scratch = torch.empty(0)
        self._job = _Job(
            packed=self._packed.data_ptr(),
            k=self.in_features,
            n=self.out_features,
            y_stride=self.out_features,
            is_bfloat16=is_bfloat16,
            parallel=openmp_parallel(),
        )

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        return self._packed.numel() * self._packed.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] -> [rows, out_features].

        Raises:
            ValueError: not such a tensor; nothing has been read.
        """
        y = torch.empty(x.shape[0], self.out_features)
        self._run(x, y, None if self._bias is None else self._bias.data_ptr(), adds=False)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += x W^T + b`` in place.

        Raises:
            ValueError: as above.
        """
        if residual.shape != (x.shape[0], self.out_features) or not _is_plain(residual):
            raise ValueError(f"a sum of shape {tuple(residual.shape)}, {residual.dtype} is not what the weight makes")
        self._run(x, residual, None, adds=True)
        if self._bias is not None:
            residual.add_(self._bias)

    def _run(self, x: Tensor, y: Tensor, bias: int | None, *, adds: bool) -> None:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype != torch.float32 or x.stride(1) != 1:
            raise ValueError(f"rows of shape {tuple(x.shape)}, {x.dtype} are not what the weight takes")
        job, num_threads = self._job, torch.get_num_threads()
        if not self._scratch.numel() or num_threads != job.num_threads:
            floats = num_threads * self._library.neaptide_linear_scratch_floats()
            self._scratch = torch.empty(floats)
            job.scratch, job.num_threads = self._scratch.data_ptr(), num_threads
        job.x, job.x_stride, job.rows = x.data_ptr(), x.stride(0), x.shape[0]
        job.y, job.bias, job.adds = y.data_ptr(), bias, adds
        self._library.neaptide_linear(ctypes.byref(job))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()

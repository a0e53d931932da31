"""Layer operations in C (``layer_ops.c``), for fp32 and bf16 on CPUs with a compiler.

Each operation is one call and one pass; torch needs two to six. At one token a call costs more than its arithmetic.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from neaptide.kernels.layer_ops.reference import TorchLayerOps
from neaptide.kernels.native import load_library, openmp_parallel
from neaptide.kernels.paged_attention.reference import HasSlots
from neaptide.kernels.recording import call, empty

SOURCE = Path(__file__).with_name("layer_ops.c")
DTYPES = (torch.float32, torch.bfloat16)


class _Threads(ctypes.Structure):
    """``threads_t`` of the C source."""

    _fields_ = [("parallel", ctypes.c_void_p), ("count", ctypes.c_int64)]


class _Rows(ctypes.Structure):
    """``rows_t`` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "x_stride", "is_bfloat16")),
        ("threads", _Threads),
        ("epsilon", ctypes.c_float),
    ]


class _HeadsJob(ctypes.Structure):
    """``heads_t`` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "dim", "x_stride", "is_bfloat16")),
        ("threads", _Threads),
        ("epsilon", ctypes.c_float),
    ]


class _Store(ctypes.Structure):
    """``store_t`` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "rotation", "slots", "cache")),
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "dim", "is_bfloat16")),
        ("threads", _Threads),
    ]


class NativeLayerOps(TorchLayerOps):
    """Runs supported tensors in C and others in torch. A row's bits do not depend on the number of rows.

    Raises:
        CompileError: the source does not compile here.
    """

    def __init__(self) -> None:
        self._parallel = openmp_parallel()
        library = load_library(SOURCE)
        self._rms_norm, self._silu_multiply = library.neaptide_rms_norm, library.neaptide_silu_multiply
        self._norm_heads, self._rotate_and_store = library.neaptide_norm_heads, library.neaptide_rotate_and_store
        for function in (self._rms_norm, self._norm_heads, self._silu_multiply, self._rotate_and_store):
            function.restype = None
        self._checked: tuple[Tensor, int] | None = None
        """The last slots that were checked, and the cache size they were checked for."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        if not self._takes(x, weight) or not weight.is_contiguous() or weight.shape != (size,):
            return super().rms_norm(x, weight, eps)
        y, is_bfloat16 = empty((rows, size), x.dtype), x.dtype == torch.bfloat16
        pointers, threads = (x.data_ptr(), weight.data_ptr(), y.data_ptr()), self._threads()
        job = _Rows(*pointers, rows, size, x.stride(0), is_bfloat16, threads, eps)
        call(self._rms_norm, job, x, weight, y)
        return y

    def norm_heads_(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        tokens, num_heads, dim = heads.shape
        plain = heads.stride(1) == dim and weight.is_contiguous() and weight.shape == (dim,)
        if not (plain and self._takes(heads, weight)):
            super().norm_heads_(heads, weight, eps)
            return
        is_bfloat16, stride = heads.dtype == torch.bfloat16, heads.stride(0)
        pointers, threads = (heads.data_ptr(), weight.data_ptr()), self._threads()
        job = _HeadsJob(*pointers, tokens, num_heads, dim, stride, is_bfloat16, threads, eps)
        call(self._norm_heads, job, heads, weight, rows="tokens")

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if not self._takes(gate_up):
            return super().silu_multiply(gate_up)
        y, is_bfloat16 = empty((rows, size), gate_up.dtype), gate_up.dtype == torch.bfloat16
        pointers, threads = (gate_up.data_ptr(), None, y.data_ptr()), self._threads()
        job = _Rows(*pointers, rows, size, gate_up.stride(0), is_bfloat16, threads, 0.0)
        call(self._silu_multiply, job, gate_up, y)
        return y

    def rotate_and_store(self, qkv: Tensor, rotation: Tensor | None, kv_cache: Tensor, plan: HasSlots) -> None:
        tokens, heads, dim = qkv.shape
        kv_heads, slots = kv_cache.shape[2] // 2, plan.slots
        matches = kv_cache.shape[3] == dim and slots.shape == (tokens,) and slots.dtype == torch.int64
        plain = all(each.is_contiguous() for each in (qkv, kv_cache, slots))
        if rotation is not None:
            matches = matches and (rotation.shape, rotation.dtype) == ((tokens, 1, dim // 2), torch.complex64)
            plain = plain and rotation.is_contiguous()
        inside = kv_cache.shape[0] * kv_cache.shape[1]
        if not (self._takes(qkv, kv_cache) and matches and plain and self._within(slots, inside)):
            super().rotate_and_store(qkv, rotation, kv_cache, plan)
            return
        job = _Store(
            qkv.data_ptr(),
            None if rotation is None else rotation.data_ptr(),
            slots.data_ptr(),
            kv_cache.data_ptr(),
            tokens,
            heads - 2 * kv_heads,
            kv_heads,
            dim,
            qkv.dtype == torch.bfloat16,
            self._threads(),
        )
        tensors = (qkv, slots, kv_cache) if rotation is None else (qkv, slots, kv_cache, rotation)
        call(self._rotate_and_store, job, *tensors, rows="tokens")

    def _within(self, slots: Tensor, count: int) -> bool:
        """Checks the slots once for all layers of a step. For invalid slots, torch raises the error."""
        if self._checked is None or self._checked[0] is not slots or self._checked[1] != count:
            low, high = torch.aminmax(slots)
            if int(low) < 0 or int(high) >= count:
                return False
            self._checked = slots, count
        return True

    def _threads(self) -> _Threads:
        """As many threads as torch uses."""
        return _Threads(self._parallel, torch.get_num_threads())

    def _takes(self, x: Tensor, other: Tensor | None = None) -> bool:
        """Whether C supports ``x``; ``other`` must have the same type."""
        same = other is None or other.dtype == x.dtype
        return same and x.dtype in DTYPES and x.device.type == "cpu" and x.stride(-1) == 1

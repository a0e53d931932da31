"""Paged attention in C (``attention.c``), for CPUs with a compiler. Same layout as the reference, fp32 and bf16."""

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neaptide.kernels.native import CompileError, load_library, openmp_parallel
from neaptide.kernels.paged_attention.long_chunks import TorchChunks, pieces
from neaptide.kernels.paged_attention.reference import PrefillChunk, attend_chunk
from neaptide.kernels.paged_attention.tables import IntArray, StepTables
from neaptide.kernels.paged_attention.work_list import MAX_ROWS, WorkList, build_work_list
from neaptide.kernels.recording import call, empty

SOURCE = Path(__file__).with_name("attention.c")
DTYPES = (torch.float32, torch.bfloat16)
MAX_DIM = 512
_FEW_ROWS = 8
"""An item of fewer rows scores them one by one, for all KV heads of a tile of keys while it is in the cache."""


class _AttentionJob(ctypes.Structure):
    """``job_t`` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "cache", "out")),
        *((name, ctypes.c_int64) for name in ("query_stride", "kv_heads", "group", "dim", "is_bfloat16", "few_rows")),
        ("block_size", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("entries", "items", "row_tokens", "row_limits", "row_parts")),
        *((name, ctypes.c_void_p) for name in ("units", "merges", "parts")),
        *((name, ctypes.c_int64) for name in ("num_units", "num_merges")),
        ("scratch", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("scratch_floats", "num_threads")),
        ("parallel", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("next_unit", "next_merge", "arrived")),
    ]


class NativeAttention:
    """Plans attention steps of one head shape.

    With ``batch_invariant`` a token's bits depend on its own context only. Every item then scores its rows one by one,
    from the first key on, in tiles of one size. Each request reads shared blocks for itself.

    ``torch_chunks`` are the long chunks of prompts that torch computes; none, until somebody has measured it.

    Raises:
        CompileError: the source does not compile here, or does not support these heads.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise CompileError(f"the kernel does not support {str(dtype).removeprefix('torch.')}")
        if head_dim > MAX_DIM or num_heads // num_kv_heads > MAX_ROWS:
            raise CompileError(f"the kernel supports heads up to {MAX_DIM} and groups up to {MAX_ROWS}")
        library = load_library(SOURCE)
        self.run = library.neaptide_attention
        self.run.restype, self.run.argtypes = None, [ctypes.POINTER(_AttentionJob)]
        self._scratch_floats = library.neaptide_attention_scratch
        self._scratch_floats.restype, self._scratch_floats.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
        library.neaptide_attention_job_bytes.restype = ctypes.c_int64
        assert library.neaptide_attention_job_bytes() == ctypes.sizeof(_AttentionJob)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.dtype, self.block_size, self.batch_invariant = dtype, block_size, batch_invariant
        self.torch_chunks = TorchChunks({})
        self._parallel = openmp_parallel()
        self._scratch = torch.empty(0)

    def plan(self, query_lens: IntArray, seq_lens: IntArray, tables: StepTables) -> "NativePlan":
        """Plans what the layers of a step share. The arguments are those of the reference's ``plan_attention``."""
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        group, num_threads = heads // kv_heads, torch.get_num_threads()
        merges = not self.batch_invariant
        by_torch = self.torch_chunks.takes(query_lens, seq_lens)
        work = build_work_list(
            query_lens, seq_lens, tables, self.block_size, group, merge_prefixes=merges, left_out=by_torch
        )
        units, most_heads = _units(work, group, kv_heads, num_threads)
        rows = int((work.items[:, 1] - work.items[:, 0]).max(initial=1)) * group
        scratch_floats = self._scratch_floats(dim, rows, most_heads)
        if self._scratch.numel() < num_threads * scratch_floats:
            self._scratch = torch.empty(num_threads * scratch_floats)
        num_parts = int(work.merges[:, 2].max(initial=0))
        parts = torch.empty(num_parts * heads * (dim + 2))
        job = _AttentionJob(
            kv_heads=kv_heads,
            group=group,
            dim=dim,
            is_bfloat16=self.dtype == torch.bfloat16,
            few_rows=MAX_ROWS + 1 if self.batch_invariant else _FEW_ROWS,
            block_size=self.block_size,
            num_units=len(units),
            num_merges=len(work.merges),
            scratch=self._scratch.data_ptr(),
            scratch_floats=scratch_floats,
            num_threads=num_threads,
            parallel=self._parallel,
            parts=parts.data_ptr(),
        )
        arrays = {
            "entries": tables.entries,
            "items": work.items,
            "row_tokens": work.row_tokens,
            "row_limits": work.row_limits,
            "row_parts": work.row_parts,
            "units": units,
            "merges": work.merges,
        }
        kept: list[object] = [self._scratch, parts]
        for name, array in arrays.items():
            contiguous = np.ascontiguousarray(array)
            setattr(job, name, contiguous.ctypes.data)
            kept.append(contiguous)
        requests = np.repeat(np.arange(len(query_lens)), query_lens)
        slots = tables.slots(requests, work.row_limits[: len(requests)] - 1, self.block_size)
        chunks = [
            chunk
            for row in by_torch
            for chunk in pieces(row, query_lens, seq_lens, tables, self.block_size, self.dtype)
        ]
        return NativePlan(self, torch.from_numpy(slots), job, tables.id_range, kept, chunks)


class NativePlan:
    """A planned step, ready to run on every layer.

    Args:
        kernel: the planner.
        slots: [num_tokens] int64, where the step's keys and values are written.
        job: the C job without the layer's tensors.
        id_range: smallest and largest id in the block tables.
        kept: memory that the job points to.
        chunks: what torch computes. No job can replay a step with them.
    """

    __slots__ = ("_id_range", "_job", "_kept", "_kernel", "chunks", "slots")

    def __init__(
        self,
        kernel: NativeAttention,
        slots: Tensor,
        job: _AttentionJob,
        id_range: tuple[int, int],
        kept: list[object],
        chunks: list[PrefillChunk],
    ) -> None:
        self.slots, self.chunks = slots, chunks
        self._kernel, self._job, self._id_range, self._kept = kernel, job, id_range, kept

    def attend(self, query: Tensor, key_value: Tensor, kv_cache: Tensor) -> Tensor:
        """The reference's ``paged_attention``. Keys and values are read from the cache; ``key_value`` is not used.

        Raises:
            ValueError: the tensors do not match the plan. Nothing has been read.
        """
        kernel = self._kernel
        shape = (kernel.num_heads, kernel.head_dim)
        if (
            query.dtype != kernel.dtype
            or query.shape != (len(self.slots), *shape)
            or query.stride()[1:] != (shape[1], 1)
        ):
            raise ValueError(f"queries of shape {tuple(query.shape)}, {query.dtype} do not match the plan")
        self._check(kv_cache)
        out = empty(query.shape, query.dtype)
        job = self._job
        job.query, job.query_stride = query.data_ptr(), query.stride(0)
        job.cache, job.out = kv_cache.data_ptr(), out.data_ptr()
        if job.num_units:
            call(kernel.run, job, query, kv_cache, out, rows=None)
        for chunk in self.chunks:
            attend_chunk(out, query, key_value, kv_cache, chunk)
        return out

    def job_for(self, kv_cache: Tensor) -> ctypes.Structure:
        """The C job that a recording needs to replay its layers for this step. The cache must have the planned
        shape.

        Raises:
            ValueError: the cache does not match the plan.
        """
        self._check(kv_cache)
        return self._job

    def _check(self, kv_cache: Tensor) -> None:
        kernel = self._kernel
        num_blocks, slot_shape = kv_cache.shape[0], (kernel.block_size, 2 * kernel.num_kv_heads, kernel.head_dim)
        if kv_cache.dtype != kernel.dtype or kv_cache.shape[1:] != slot_shape or not kv_cache.is_contiguous():
            raise ValueError(f"a cache of shape {tuple(kv_cache.shape)}, {kv_cache.dtype} does not match the plan")
        if self._id_range[0] < 0 or self._id_range[1] >= num_blocks:
            raise ValueError(f"block ids {self._id_range} in a cache of {num_blocks}")


def _units(work: WorkList, group: int, kv_heads: int, num_threads: int) -> tuple[npt.NDArray[np.int64], int]:
    """Work units [units, 3], item and KV head range, largest first; and the most KV heads of one unit.

    Threads take one unit at a time. Items of few rows read a tile of keys for all KV heads, which reads memory in
    order. Otherwise, or with too few items to keep the threads busy, a unit is one KV head.
    """
    tokens, keys = work.items[:, 1] - work.items[:, 0], work.items[:, 4] - work.items[:, 3]
    whole = (tokens * group < _FEW_ROWS) & (num_threads == 1 or len(work.items) >= 2 * num_threads)
    counts = np.where(whole, 1, kv_heads)
    item = np.repeat(np.arange(len(counts)), counts)
    first = np.arange(len(item)) - np.repeat(np.cumsum(counts) - counts, counts)
    units = np.stack((item, first, np.where(whole[item], kv_heads, first + 1)), axis=1)
    if num_threads > 1:
        cost = (tokens * keys)[item] * (units[:, 2] - units[:, 1])
        units = units[(-cost).argsort(kind="stable")]
    return units, kv_heads if whole.any() else 1

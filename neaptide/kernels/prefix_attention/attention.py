"""Plans a step's attention on the work list and launches the kernels."""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neaptide.kernels.kv_write.reference import WritePlaces, slots_of
from neaptide.kernels.launching import is_interpreted, why_not
from neaptide.kernels.paged_attention.tables import IntArray, StepTables
from neaptide.kernels.paged_attention.work_list import WorkList, build_work_list, split_items
from neaptide.kernels.prefix_attention.kernel import attend_kernel, merge_kernel
from neaptide.kernels.prefix_attention.tiles import Tiles, load_tiles, pick_tiles
from neaptide.kernels.transfer import to_device

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP32_PRECISION = "tf32x3"
"""fp32 products use three tensor-core products. Otherwise a tile of 64 rows spills 728 bytes per thread."""
_LEAST_SPLIT_TOKENS, _MOST_SPLIT_TOKENS = 256, 4096
"""Limits on the keys of an item: fewer do not repay a merge, more leave processors idle at the end of a launch."""
_PROGRAMS_PER_PROCESSOR = 4
"""Target of the split: two programs run at once on a processor, and the longest should not end last."""
_ALIGNED = 4
"""Arrays of a step are aligned to this many int32, so that the compiler can rely on aligned pointers."""


class PrefixAttention:
    """Plans attention steps of one head shape for a device that Triton supports.

    Blocks that several requests share are read once for all of them, with nested prefixes. Long contexts are split, so
    that a few of them keep the device busy.

    Args:
        num_heads: query heads.
        num_kv_heads: key heads, and as many value heads.
        head_dim: size of every head.
        dtype: of queries and cache.
        block_size: tokens per block.
        device: of all tensors.
        tiles: replace those of the file, for tuning and tests.
        split_tokens: most keys per item, for tuning and tests; None decides for each step.
        merge_prefixes: read shared blocks once.

    Raises:
        ValueError: Triton does not run on the device, or there are no tiles for these heads. The message is one line.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int,
        device: torch.device,
        *,
        tiles: Tiles | None = None,
        split_tokens: int | None = None,
        merge_prefixes: bool = True,
    ) -> None:
        if reason := why_not(device):
            raise ValueError(reason)
        group = num_heads // num_kv_heads
        if dtype not in DTYPES or group * num_kv_heads != num_heads:
            raise ValueError(f"the kernel does not support {dtype} with {num_heads} heads on {num_kv_heads}")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        tiles = tiles or pick_tiles(load_tiles(), head_dim, group, dtype.itemsize, name)
        if tiles is None or group > tiles.wide_rows:
            raise ValueError(f"the kernel has no tiles for heads of {head_dim} with {group} per KV head")
        self.num_heads, self.num_kv_heads, self.head_dim, self.group = num_heads, num_kv_heads, head_dim, group
        self.dtype, self.block_size, self.device, self.tiles = dtype, block_size, device, tiles
        self._split_tokens, self._merge_prefixes = split_tokens, merge_prefixes
        on_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1

    def plan(self, query_lens: IntArray, seq_lens: IntArray, tables: StepTables) -> "PrefixPlan":
        """Plans what the layers of a step share. The arguments are those of
        ``neaptide.kernels.paged_attention.plan_attention``."""
        work = build_work_list(
            query_lens,
            seq_lens,
            tables,
            self.block_size,
            self.group,
            merge_prefixes=self._merge_prefixes,
            max_rows=self.tiles.wide_rows,
            shared_chunk_tokens=self.tiles.wide_rows // self.group - 1,
        )
        return PrefixPlan(self, split_items(work, self._split(work)), tables, query_lens)

    def _split(self, work: WorkList) -> int:
        """Most keys per item, in whole tiles, that give enough programs."""
        if self._split_tokens is not None:
            return self._split_tokens
        keys = int((work.items[:, 4] - work.items[:, 3]).sum()) * self.num_kv_heads
        wanted = keys // (_PROGRAMS_PER_PROCESSOR * self._processors)
        tile = max(self.tiles.wide_keys, self.tiles.narrow_keys)
        return -(-min(max(wanted, _LEAST_SPLIT_TOKENS), _MOST_SPLIT_TOKENS) // tile) * tile


class PrefixPlan:
    """A planned step on the device, ready to run on every layer.

    Args:
        kernel: the planner.
        work: the step's work list.
        tables: block tables of its requests.
        query_lens: [requests] tokens computed in this step.
    """

    def __init__(self, kernel: PrefixAttention, work: WorkList, tables: StepTables, query_lens: IntArray) -> None:
        self.kernel = kernel
        self._blocks = tables.id_range
        self.num_tokens = int(query_lens.sum())
        items = work.items[_longest_first(work)]
        requests = np.repeat(np.arange(len(query_lens)), query_lens)
        arrays = (
            items,
            tables.entries,
            work.row_tokens,
            work.row_limits,
            work.row_parts,
            work.merges,
            tables.starts[requests],
        )
        self.items, self.table, self.row_tokens, self.row_limits, self.row_parts, self.merges, self.token_tables = (
            _packed(arrays, kernel.device)
        )
        """int32 on the device; ``token_tables`` [tokens] is the start of a token's block table in ``table``."""
        self.parts, self._part_scales = parts_of(kernel, int(work.merges[:, 2].max(initial=0)))
        self._slots: Tensor | None = None

    @property
    def places(self) -> WritePlaces:
        """Cache positions of the step's tokens."""
        return WritePlaces(self.table, self.token_tables, self.row_limits[: self.num_tokens])

    @property
    def slots(self) -> Tensor:
        """[num_tokens] int64 on the device: the slots of keys and values, for writes with torch."""
        if self._slots is None:
            self._slots = slots_of(self.places, self.kernel.block_size)
        return self._slots

    def attend(self, query: Tensor, key_value: Tensor, kv_cache: Tensor) -> Tensor:
        """Attention of each token of the step over its request's context, scaled by 1/sqrt(head_dim).

        Args:
            query: [num_tokens, num_heads, head_dim]; the heads of a token are contiguous.
            key_value: not read; the step's keys and values are already in the cache.
            kv_cache: [num_blocks, block_size, 2 * num_kv_heads, head_dim].

        Returns:
            [num_tokens, num_heads, head_dim], contiguous.

        Raises:
            ValueError: the tensors do not match the plan. Nothing has been read.
        """
        kernel, tiles = self.kernel, self.kernel.tiles
        self._check(query, kv_cache)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lanes = max(16, 1 << (kernel.head_dim - 1).bit_length())
        attend_kernel[(len(self.items) * kernel.num_kv_heads,)](
            query,
            kv_cache,
            out,
            self.parts,
            self._part_scales,
            self.items,
            self.table,
            self.row_tokens,
            self.row_limits,
            self.row_parts,
            query.stride(0),
            math.log2(math.e) / math.sqrt(kernel.head_dim),
            KV_HEADS=kernel.num_kv_heads,
            GROUP=kernel.group,
            DIM=kernel.head_dim,
            BLOCK_SIZE=kernel.block_size,
            WIDE_ROWS=tiles.wide_rows,
            WIDE_KEYS=tiles.wide_keys,
            NARROW_ROWS=tiles.narrow_rows,
            NARROW_KEYS=tiles.narrow_keys,
            LANES=lanes,
            STAGES=tiles.stages,
            PRECISION="ieee" if torch.version.hip else FP32_PRECISION,
            UPCAST=is_interpreted(attend_kernel) and kernel.dtype == torch.bfloat16,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            enable_fp_fusion=True,
            **({} if torch.version.hip else {"maxnreg": tiles.registers}),
        )
        if len(self.merges):
            merge_kernel[(len(self.merges) * kernel.num_heads,)](
                out,
                self.parts,
                self._part_scales,
                self.merges,
                HEADS=kernel.num_heads,
                DIM=kernel.head_dim,
                LANES=lanes,
                num_warps=1,
                enable_fp_fusion=True,
            )
        return out

    def _check(self, query: Tensor, kv_cache: Tensor) -> None:
        kernel = self.kernel
        heads, dim = kernel.num_heads, kernel.head_dim
        is_planned = query.shape == (self.num_tokens, heads, dim) and query.stride()[1:] == (dim, 1)
        if not is_planned or (query.dtype, query.device.type) != (kernel.dtype, kernel.device.type):
            raise ValueError(f"queries of shape {tuple(query.shape)}, {query.dtype} do not match the plan")
        slot_shape = (kernel.block_size, 2 * kernel.num_kv_heads, dim)
        is_planned = kv_cache.shape[1:] == slot_shape and kv_cache.is_contiguous()
        if not is_planned or (kv_cache.dtype, kv_cache.device.type) != (kernel.dtype, kernel.device.type):
            raise ValueError(f"a cache of shape {tuple(kv_cache.shape)}, {kv_cache.dtype} does not match the plan")
        if self._blocks[0] < 0 or self._blocks[1] >= len(kv_cache):
            raise ValueError(f"block ids {self._blocks} in a cache of {len(kv_cache)}")


def parts_of(kernel: PrefixAttention, num_parts: int) -> tuple[Tensor, Tensor]:
    """Memory for partial results: values [parts, heads, head_dim] fp32 and scales [parts, heads]."""
    heads, dim = kernel.num_heads, kernel.head_dim
    return torch.empty(num_parts, heads, dim, device=kernel.device), torch.empty(num_parts, heads, device=kernel.device)


def _longest_first(work: WorkList) -> IntArray:
    """Item order, most work first, so that no long item starts last."""
    rows, keys = work.items[:, 1] - work.items[:, 0], work.items[:, 4] - work.items[:, 3]
    order: IntArray = (-rows * keys).argsort(kind="stable")
    return order


def _packed(arrays: tuple[npt.NDArray[np.integer], ...], device: torch.device) -> list[Tensor]:
    """All arrays as int32 on the device, sent in one copy."""
    starts = np.cumsum([0] + [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]).tolist()
    packed = np.zeros(starts[-1], np.int32)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.reshape(-1)
    on_device = to_device(torch.from_numpy(packed), device)
    return [
        on_device[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)
    ]

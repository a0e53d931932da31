"""Steps that Triton's kernels run, keys and values included."""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from neaptide.kernels.kv_write.launch import write
from neaptide.kernels.prefix_attention.attention import PrefixAttention, PrefixPlan
from neaptide.kernels.prefix_attention.tiles import Tiles
from tests.kernels.cases import CPU, Case

TILES = Tiles(wide_rows=64, wide_keys=64, narrow_rows=16, narrow_keys=64, stages=1, warps=4, registers=200)
"""Large: the interpreter takes as long for any tile."""


def planned(
    case: Case,
    are_reversed: npt.NDArray[np.bool_] | None = None,
    *,
    tiles: Tiles = TILES,
    split_tokens: int = 1 << 20,
    merge_prefixes: bool = True,
) -> PrefixPlan:
    """The case's step, whose keys and values the kernel has written."""
    heads, dim = case.query.shape[1:]
    kernel = PrefixAttention(
        heads,
        case.kv_heads,
        dim,
        case.dtype,
        case.block_size,
        CPU,
        tiles=tiles,
        split_tokens=split_tokens,
        merge_prefixes=merge_prefixes,
    )
    plan = kernel.plan(case.query_lens, case.seq_lens, case.step_tables(are_reversed))
    write(case.new, None, case.cache, plan.places)
    return plan


def attended(case: Case, **how: Any) -> Tensor:
    return planned(case, **how).attend(case.query, case.new, case.cache)

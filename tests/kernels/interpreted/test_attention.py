"""Attention by Triton's kernel, interpreted, against a float64 loop over tokens and against itself."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.kernels.prefix_attention.attention import PrefixAttention
from neaptide.kernels.prefix_attention.tiles import Tiles
from tests.kernels.cases import CPU, TOLERANCES, Case, tree_with_chunks
from tests.kernels.interpreted.steps import TILES, attended, planned

EDGES = [(1, 63), (5, 13), (29, 0), (1, 1), (17, 40), (1, 0), (1, 15), (1, 16), (1, 64)]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_decodes_and_chunks_at_the_edges_of_blocks_and_tiles(dtype: torch.dtype) -> None:
    case = Case(EDGES, dtype=dtype)
    out = attended(case)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), case.expected(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(1, 1, 64, 16), (3, 1, 96, 7), (8, 2, 128, 1), (7, 1, 128, 16), (8, 1, 64, 7), (20, 1, 96, 16)],
)
def test_head_shapes(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    case = Case([(1, 20), (9, 9), (1, 70)], heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    torch.testing.assert_close(attended(case).double(), case.expected(), **CLOSE)


@pytest.mark.parametrize(
    "tiles",
    [TILES, Tiles(wide_rows=32, wide_keys=16, narrow_rows=16, narrow_keys=32, stages=1, warps=4, registers=200)],
)
def test_prefixes_within_prefixes_are_read_once(tiles: Tiles) -> None:
    """The list has an item for each run of blocks, and each reader goes on behind the runs."""
    case = tree_with_chunks()
    plan = planned(case, tiles=tiles)
    runs = [item for item in plan.items.tolist() if item[0] >= int(case.query_lens.sum())]
    readers = {(offset, first, last): 0 for _, _, offset, first, last in runs}
    for first_row, last_row, offset, first, last in runs:
        readers[offset, first, last] += last_row - first_row
    assert readers == {(0, 0, 96): 13, (7, 96, 176): 11}
    torch.testing.assert_close(plan.attend(case.query, case.new, case.cache).double(), case.expected(), **CLOSE)


def test_what_is_read_together_is_what_is_read_alone() -> None:
    case = tree_with_chunks()
    torch.testing.assert_close(attended(case), attended(case, merge_prefixes=False), **CLOSE)


@pytest.mark.parametrize(("make", "split_tokens"), [(tree_with_chunks, 80), (lambda: Case(EDGES), 16)])
def test_the_split_changes_nothing(make: Callable[[], Case], split_tokens: int) -> None:
    case = make()
    plan = planned(case, split_tokens=split_tokens)
    assert (plan.items[:, 4] - plan.items[:, 3]).max() <= split_tokens
    torch.testing.assert_close(plan.attend(case.query, case.new, case.cache).double(), case.expected(), **CLOSE)


def test_reversed_blocks_give_the_same_bits() -> None:
    plain, turned = tree_with_chunks(), tree_with_chunks()
    ids = np.unique(turned.tables)
    chosen = ids[np.random.default_rng(0).random(len(ids)) < 0.5]
    turned.cache[chosen] = turned.cache[chosen].flip(1)
    plan = planned(turned, np.isin(turned.tables, chosen), split_tokens=128)
    assert torch.equal(plan.attend(turned.query, turned.new, turned.cache), attended(plain, split_tokens=128))
    turned.cache[chosen] = turned.cache[chosen].flip(1)
    assert torch.equal(turned.cache.nan_to_num(7.0), plain.cache.nan_to_num(7.0))


def test_two_tenants_of_a_block_read_as_if_each_had_its_own() -> None:
    """One fills the block from the left, the other from the right; the second's table has the direction bit."""
    alone, together = (Case([(1, 70), (1, 70)]) for _ in range(2))
    left, right = together.tables[0, 4], together.tables[1, 4]
    together.tables[1, 4] = left
    together.cache[left, 10:16] = alone.cache[right, 0:6].flip(0)
    are_reversed = np.zeros(together.tables.shape, bool)
    are_reversed[1, 4] = True
    plan = planned(together, are_reversed)
    assert torch.equal(plan.attend(together.query, together.new, together.cache), attended(alone))


def test_the_order_of_slots_in_a_block_does_not_matter_to_a_decode() -> None:
    case = Case([(1, 64), (1, 90)])
    expected = attended(case)
    case.cache[case.tables[0, 1]] = case.cache[case.tables[0, 1]][torch.randperm(16)]
    case.cache[case.tables[1, 4]] = case.cache[case.tables[1, 4]][torch.randperm(16)]
    torch.testing.assert_close(attended(case), expected, **CLOSE)


def test_what_unused_slots_hold_is_never_seen() -> None:
    """Every slot that holds no token of the step is NaN, in blocks of requests too, and so is block 0, which nobody has
    and which keys behind the last one of an item are looked up in."""
    case = tree_with_chunks()
    case.tables += 1
    case.cache = torch.cat((torch.full_like(case.cache[:1], float("nan")), case.cache))
    assert case.cache[case.tables[0, 6], 5:].isnan().all()
    assert attended(case, split_tokens=128).isfinite().all()


def test_empty_items_do_nothing() -> None:
    """As they pad a list that is to have a fixed length."""
    case = tree_with_chunks()
    plan = planned(case)
    expected = plan.attend(case.query, case.new, case.cache)
    plan.items = torch.cat((plan.items[:3], torch.zeros(4, 5, dtype=torch.int32), plan.items[3:]))
    assert torch.equal(plan.attend(case.query, case.new, case.cache), expected)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_one_poisoned_request_stays_alone() -> None:
    case = Case([(1, 20), (1, 25), (4, 12), (6, 0)])
    case.full[1][3] = float("nan")
    case.cache[case.tables[1, 0], 3] = float("nan")
    case.query[6] = float("nan")
    out, expected = attended(case, split_tokens=16).double(), case.expected()
    assert out[1].isnan().all()
    assert out[6].isnan().all()
    clean = [0, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    torch.testing.assert_close(out[clean], expected[clean], **CLOSE)


def test_large_scores_do_not_overflow() -> None:
    case = Case([(1, 40), (12, 30)])
    case.query *= 1e4
    torch.testing.assert_close(attended(case, split_tokens=16).double(), case.expected(), atol=1e-3, rtol=1e-3)


def test_strided_queries() -> None:
    """As they lie in the result of a fused projection."""
    case = Case([(1, 40), (5, 20)])
    plan = planned(case)
    fused = torch.cat((case.query, case.new), dim=1)
    torch.testing.assert_close(plan.attend(fused[:, :6], case.new, case.cache).double(), case.expected(), **CLOSE)


@pytest.mark.full
@settings(max_examples=6)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100)), min_size=1, max_size=4),
    st.sampled_from([(1, 1, 64), (7, 1, 16), (6, 2, 40), (4, 4, 96)]),
    st.sampled_from([32, 1 << 20]),
    st.integers(0, 3),
)
def test_any_mix_against_float64(
    lens: list[tuple[int, int]], shape: tuple[int, int, int], split_tokens: int, seed: int
) -> None:
    heads, kv_heads, dim = shape
    case = Case(lens, heads=heads, kv_heads=kv_heads, dim=dim, seed=seed)
    torch.testing.assert_close(attended(case, split_tokens=split_tokens).double(), case.expected(), **CLOSE)


@pytest.mark.parametrize("block", [-1, 99])
def test_block_ids_outside_the_cache_are_refused(block: int) -> None:
    case = Case([(1, 40)])
    kernel = PrefixAttention(6, 2, 16, torch.float32, 16, CPU)
    case.tables[0, 1] = block
    with pytest.raises(ValueError, match="block ids"):
        kernel.plan(case.query_lens, case.seq_lens, case.step_tables()).attend(case.query, case.new, case.cache)


def test_tensors_of_another_shape_are_refused() -> None:
    case = Case([(1, 40)])
    plan = planned(case)
    with pytest.raises(ValueError, match="not match the plan"):
        plan.attend(case.query[:, :4], case.new, case.cache)
    with pytest.raises(ValueError, match="not match the plan"):
        plan.attend(case.query, case.new, case.cache.double())


def test_heads_that_no_tile_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="no tiles for heads of 512 with 1 per KV head"):
        PrefixAttention(1, 1, 512, torch.bfloat16, 16, CPU)
    with pytest.raises(ValueError, match="no tiles for heads of 64 with 80 per KV head"):
        PrefixAttention(80, 1, 64, torch.bfloat16, 16, CPU)
    with pytest.raises(ValueError, match="float64"):
        PrefixAttention(1, 1, 64, torch.float64, 16, CPU)

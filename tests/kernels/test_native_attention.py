"""What the C kernel does beside the reference: a work list, prefixes that are read once, threads, checks."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.kernels.native import COMPILERS
from neaptide.kernels.paged_attention import write_kv
from neaptide.kernels.paged_attention.native import NativeAttention
from neaptide.kernels.paged_attention.work_list import WorkList, build_work_list
from tests.kernels.cases import TOLERANCES, Case, share

BLOCK = 16

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")


def tree(dtype: torch.dtype = torch.float32) -> Case:
    """Four decodes share 6 blocks, two of them 5 more; one shares too little, and a chunk and a stranger nothing."""
    case = Case([(1, 100), (1, 200), (1, 130), (1, 219), (1, 70), (9, 120), (1, 180)], dtype=dtype)
    for request, owner, num_blocks in [(1, 0, 6), (2, 0, 6), (3, 0, 6), (3, 1, 11), (4, 0, 1), (5, 0, 6)]:
        share(case, request, owner, num_blocks)
    return case


def work(case: Case, group: int = 3) -> WorkList:
    return build_work_list(case.query_lens, case.seq_lens, case.step_tables(), BLOCK, group)


def test_items_of_decodes_and_chunks() -> None:
    """Tiles of 16 tokens where three query heads share a KV head; a tile sees no key behind its last token."""
    case = Case([(1, 20), (40, 5), (3, 0)])
    found = work(case)
    assert found.items.tolist() == [
        [0, 1, 0, 0, 21],
        [1, 17, 2, 0, 21],
        [17, 33, 2, 0, 37],
        [33, 41, 2, 0, 45],
        [41, 44, 5, 0, 3],
    ]
    assert found.row_limits.tolist() == [21, *range(6, 46), 1, 2, 3]
    assert found.row_tokens.tolist() == list(range(44))
    assert set(found.row_parts.tolist()) == {-1}


def test_shared_runs_are_items_of_their_own() -> None:
    case = tree()
    found = work(case)
    assert found.items[-2:].tolist() == [[15, 19, 0, 0, 96], [19, 21, 7, 96, 176]]
    assert found.row_tokens[15:].tolist() == [0, 1, 2, 3, 1, 3]
    assert found.items[:4, 3].tolist() == [96, 176, 96, 176]  # what each goes on to read on its own
    assert found.items[4:8, 3].tolist() == [0, 0, 0, 0]
    assert found.merges.tolist() == [[0, 0, 2], [1, 2, 5], [2, 5, 7], [3, 7, 10]]
    assert found.row_parts[15:].tolist() == [0, 2, 5, 7, 3, 8]
    assert found.row_parts[:5].tolist() == [1, 4, 6, 9, -1]


def test_runs_of_many_readers_are_cut() -> None:
    case = Case([(1, 80)] * 20)
    for request in range(1, 20):
        share(case, request, 0, 4)
    assert (work(case).items[20:, 1] - work(case).items[20:, 0]).tolist() == [16, 4]


def test_blocks_that_this_step_writes_to_are_not_shared() -> None:
    case = Case([(1, 95), (1, 95)])
    share(case, 1, 0, 5)
    case.tables[1, 5] = case.tables[0, 5]  # as two branches of one request would have it
    assert work(case).items[2:].tolist() == [[2, 4, 0, 0, 80]]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_prefixes_against_float64(dtype: torch.dtype) -> None:
    case = tree(dtype)
    expected = case.expected()
    torch.testing.assert_close(case.run("native").double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@needs_compiler
@pytest.mark.parametrize("share_of_blocks", [0.5, 1.0])
def test_reversed_blocks_give_the_same_bits(share_of_blocks: float) -> None:
    plain, turned = tree(), tree()
    ids = np.unique(turned.tables)
    chosen = ids[np.random.default_rng(0).random(len(ids)) < share_of_blocks]
    turned.cache[chosen] = turned.cache[chosen].flip(1)
    kernel = NativeAttention(6, 2, 16, torch.float32, BLOCK)
    plan = kernel.plan(turned.query_lens, turned.seq_lens, turned.step_tables(np.isin(turned.tables, chosen)))
    write_kv(turned.cache, turned.new, plan)
    assert torch.equal(plan.attend(turned.query, turned.new, turned.cache), plain.run("native"))
    turned.cache[chosen] = turned.cache[chosen].flip(1)
    assert torch.equal(turned.cache.nan_to_num(7.0), plain.cache.nan_to_num(7.0))


def test_tenants_of_one_block_share_nothing() -> None:
    """The same blocks from both sides: half of each block is the one's, half the other's."""
    case = Case([(1, 95), (1, 95)])
    case.tables[1] = case.tables[0]
    tables = case.step_tables(np.array([[False], [True]]))
    assert len(build_work_list(case.query_lens, case.seq_lens, tables, BLOCK, 3).items) == 2


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (8, 8, 24), (24, 1, 40)])
def test_threads_change_nothing(two_threads: None, heads: int, kv_heads: int, dim: int) -> None:
    case = Case([(1, 70), (50, 30), (1, 5), (1, 300), (20, 0)], heads=heads, kv_heads=kv_heads, dim=dim)
    two = case.run("native")
    torch.set_num_threads(1)
    assert torch.equal(two, case.run("native"))


@needs_compiler
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 150)), min_size=1, max_size=6),
    st.sampled_from([(1, 1, 64), (7, 1, 16), (9, 3, 40), (4, 4, 96), (16, 2, 33)]),
    st.integers(0, 3),
)
def test_any_mix_against_float64(lens: list[tuple[int, int]], shape: tuple[int, int, int], seed: int) -> None:
    heads, kv_heads, dim = shape
    case = Case(lens, heads=heads, kv_heads=kv_heads, dim=dim, seed=seed)
    torch.testing.assert_close(case.run("native").double(), case.expected(), atol=1e-5, rtol=1e-5)


@needs_compiler
def test_large_scores_do_not_overflow() -> None:
    case = Case([(1, 40), (12, 30)])
    case.query *= 1e4
    torch.testing.assert_close(case.run("native").double(), case.expected(), atol=1e-3, rtol=1e-3)


@needs_compiler
@pytest.mark.parametrize("block", [-1, 99])
def test_block_ids_outside_the_cache_are_refused(block: int) -> None:
    case = Case([(1, 40)])
    kernel = NativeAttention(6, 2, 16, torch.float32, BLOCK)
    case.tables[0, 1] = block
    plan = kernel.plan(case.query_lens, case.seq_lens, case.step_tables())
    with pytest.raises(ValueError, match="block ids"):
        plan.attend(case.query, case.new, case.cache)


@needs_compiler
def test_tensors_of_another_shape_are_refused() -> None:
    case = Case([(1, 40)])
    plan = case.planner("native")(case.query_lens, case.seq_lens, case.step_tables())
    with pytest.raises(ValueError, match="not match the plan"):
        plan.attend(case.query[:, :4], case.new, case.cache)
    with pytest.raises(ValueError, match="not match the plan"):
        plan.attend(case.query, case.new, case.cache.double())


@needs_compiler
def test_strided_queries() -> None:
    """Queries as they lie in the result of a fused projection."""
    case = Case([(1, 40), (5, 20)])
    plan = case.planner("native")(case.query_lens, case.seq_lens, case.step_tables())
    write_kv(case.cache, case.new, plan)
    fused = torch.cat((case.query, case.new), dim=1)
    found = plan.attend(fused[:, :6], case.new, case.cache).double()
    torch.testing.assert_close(found, case.expected(), atol=1e-5, rtol=1e-5)
    assert np.isfinite(fused.numpy()).all()


@needs_compiler
@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100)), min_size=1, max_size=4),
    st.sampled_from([(9, 3, 64), (2, 2, 32), (7, 1, 96), (4, 2, 80)]),
    st.integers(0, 3),
)
def test_any_mix_in_bf16_against_float64(lens: list[tuple[int, int]], shape: tuple[int, int, int], seed: int) -> None:
    """A weight and the result are rounded by half of the last place of bf16 at most, sums are not."""
    heads, kv_heads, dim = shape
    case = Case(lens, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, seed=seed)
    greatest = float(torch.cat(case.full).abs().max())
    assert float((case.run("native").double() - case.expected()).abs().max()) <= 2**-8 * greatest


@needs_compiler
@pytest.mark.parametrize("dim", [32, 64, 80])
def test_shared_prefixes_of_wider_heads_in_bf16(dim: int) -> None:
    case = Case([(1, 100), (1, 200), (1, 131), (9, 120)], dim=dim, dtype=torch.bfloat16)
    for request in (1, 2, 3):
        share(case, request, 0, 6)
    greatest = float(torch.cat(case.full).abs().max())
    assert float((case.run("native").double() - case.expected()).abs().max()) <= 2**-8 * greatest


@needs_compiler
def test_the_last_key_of_an_odd_context_has_no_partner_in_bf16() -> None:
    """Values are weighed in pairs of keys; where a tile ends with one, none of the tile before may stand beside it."""
    case = Case([(1, 31), (1, 6)], dim=64, dtype=torch.bfloat16)
    case.full[0][7] = float("nan")
    case.cache[case.tables[0, 0], 7] = float("nan")
    out = case.run("native")
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1].double(), case.expected()[1], atol=3e-2, rtol=3e-2)

"""Paged attention, in torch and in C, against a float64 loop over tokens."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.kernels.native import COMPILERS
from neaptide.kernels.paged_attention import StepTables, plan_attention, write_kv
from neaptide.kernels.paged_attention import reference as implementation
from tests.kernels.cases import CPU, TOLERANCES, Case

KERNELS = ["torch", *(["native"] if any(map(shutil.which, COMPILERS)) else [])]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "lens",
    [[(1, 63), (5, 13), (29, 0), (1, 1), (17, 40), (1, 0), (1, 15), (1, 16)], [(1, 499)], [(1, 40), (1, 30)]],
)
def test_against_float64(lens: list[tuple[int, int]], dtype: torch.dtype, kernels: str) -> None:
    if kernels == "native" and dtype == torch.float16:
        pytest.skip("torch computes float16")
    case = Case(lens, dtype=dtype)
    torch.testing.assert_close(
        case.run(kernels).double(), case.expected(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (7, 1), (9, 3)])
@pytest.mark.parametrize(("dim", "block_size"), [(2, 1), (64, 16), (96, 7)])
def test_shapes(heads: int, kv_heads: int, dim: int, block_size: int, kernels: str) -> None:
    case = Case([(1, 20), (3, 9), (1, 2), (12, 0)], heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    torch.testing.assert_close(case.run(kernels).double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_ragged_decodes_are_split_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_SCRATCH_TOKENS", 64)
    case = Case([(1, 5), (1, 200), (1, 6), (1, 7), (1, 190), (1, 8)])
    tables = StepTables.of(case.tables)  # more blocks than contexts
    plan = plan_attention(case.query_lens, case.seq_lens, tables, 16, dtype=case.dtype, device=CPU)
    assert [(group.start, group.stop) for group in plan.decodes] == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]
    write_kv(case.cache, case.new, plan)
    found = plan.attend(case.query, case.new, case.cache)
    torch.testing.assert_close(found.double(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_poisoned_request_stays_alone(kernels: str) -> None:
    """NaN that a request has written itself reaches its own rows only."""
    case = Case([(1, 20), (1, 25), (4, 12), (6, 0)])
    case.full[1][3] = float("nan")
    case.cache[case.tables[1, 0], 3] = float("nan")
    case.query[6] = float("nan")  # first token of the last request; what comes of it is up to the kernel
    out, expected = case.run(kernels).double(), case.expected()
    assert out[1].isnan().all()
    clean = [0, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    torch.testing.assert_close(out[clean], expected[clean], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=25)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 3))
def test_chunking_does_not_matter(kernels: str, chunks: list[int], block_size: int, seed: int) -> None:
    """A prompt computed chunk by chunk gives what it gives at once."""
    total = sum(chunks)
    case = Case([(total, 0)], block_size=block_size, seed=seed)
    cache = torch.full_like(case.cache, float("nan"))
    parts, done = [], 0
    for chunk in chunks:
        plan = case.planner(kernels)(np.array([chunk]), np.array([done + chunk]), case.step_tables())
        new = case.full[0][done : done + chunk]
        write_kv(cache, new, plan)
        parts.append(plan.attend(case.query[done : done + chunk], new, cache))
        done += chunk
    torch.testing.assert_close(torch.cat(parts), case.run(kernels), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("reversed_share", [0.5, 1.0])
def test_reversed_blocks_give_the_same_bits(reversed_share: float, kernels: str) -> None:
    lens = [(1, 63), (5, 13), (29, 0), (1, 1), (17, 40), (1, 0), (1, 15), (1, 16), (1, 499)]
    plain, turned = Case(lens), Case(lens)
    chosen = np.random.default_rng(0).random(turned.tables.shape) < reversed_share
    blocks = np.unique(turned.tables[chosen])
    are_reversed = np.isin(turned.tables, blocks)
    turned.cache[blocks] = turned.cache[blocks].flip(1)
    plan = turned.planner(kernels)(turned.query_lens, turned.seq_lens, turned.step_tables(are_reversed))
    write_kv(turned.cache, turned.new, plan)
    assert torch.equal(plan.attend(turned.query, turned.new, turned.cache), plain.run(kernels))
    turned.cache[blocks] = turned.cache[blocks].flip(1)
    assert torch.equal(turned.cache.nan_to_num(7.0), plain.cache.nan_to_num(7.0))

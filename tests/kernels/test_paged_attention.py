"""Paged attention against a float64 loop over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neaptide.kernels.paged_attention import paged_attention, plan_attention, write_kv
from neaptide.kernels.paged_attention import reference as implementation

CPU = torch.device("cpu")


class Case:
    """Requests with given contexts and chunk lengths in a cache whose unused slots are NaN."""

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        """``lens``: (query length, context before) of each request."""
        torch.manual_seed(seed)
        self.query_lens = np.array([query for query, _ in lens])
        self.seq_lens = np.array([query + context for query, context in lens])
        self.kv_heads, self.block_size, self.dtype = kv_heads, block_size, dtype
        self.full = [torch.randn(n, 2 * kv_heads, dim, dtype=dtype) for n in self.seq_lens.tolist()]
        self.query = torch.randn(int(self.query_lens.sum()), heads, dim, dtype=dtype)
        blocks = -(-self.seq_lens // block_size)
        pool = torch.randperm(int(blocks.sum()) + 3).tolist()
        self.tables = np.full((len(lens), int(blocks.max()) + 1), 0, dtype=np.int64)
        self.cache = torch.full((len(pool), block_size, 2 * kv_heads, dim), float("nan"), dtype=dtype)
        for row, count in enumerate(blocks.tolist()):
            self.tables[row, :count] = [pool.pop() for _ in range(count)]
            context = int(self.seq_lens[row] - self.query_lens[row])
            for position in range(context):
                block = self.tables[row, position // block_size]
                self.cache[block, position % block_size] = self.full[row][position]
        self.new = torch.cat([full[len(full) - n :] for full, n in zip(self.full, self.query_lens, strict=True)])

    def run(self) -> Tensor:
        plan = plan_attention(
            self.query_lens, self.seq_lens, self.tables, self.block_size, dtype=self.dtype, device=CPU
        )
        write_kv(self.cache, self.new, plan)
        return paged_attention(self.query, self.new, self.cache, plan)

    def expected(self) -> Tensor:
        """[num_tokens, heads, dim] float64, one token and head at a time."""
        out, row = torch.empty(self.query.shape, dtype=torch.float64), 0
        group = self.query.shape[1] // self.kv_heads
        for full, query_len in zip(self.full, self.query_lens.tolist(), strict=True):
            keys, values = full.double().split(self.kv_heads, dim=1)
            for offset in range(query_len):
                seen = len(full) - query_len + offset + 1
                for head in range(self.query.shape[1]):
                    scores = keys[:seen, head // group] @ self.query[row, head].double() / self.query.shape[2] ** 0.5
                    out[row, head] = torch.softmax(scores, 0) @ values[:seen, head // group]
                row += 1
        return out


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("lens", [[(1, 63), (5, 13), (29, 0), (1, 1), (17, 40), (1, 0), (1, 15), (1, 16)], [(1, 499)]])
def test_against_float64(lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = Case(lens, dtype=dtype)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (7, 1), (9, 3)])
@pytest.mark.parametrize(("dim", "block_size"), [(2, 1), (64, 16), (96, 7)])
def test_shapes(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    case = Case([(1, 20), (3, 9), (1, 2), (12, 0)], heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_ragged_decodes_are_split_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_SCRATCH_TOKENS", 64)
    case = Case([(1, 5), (1, 200), (1, 6), (1, 7), (1, 190), (1, 8)])
    plan = plan_attention(case.query_lens, case.seq_lens, case.tables, 16, dtype=case.dtype, device=CPU)
    assert [(group.start, group.stop) for group in plan.decodes] == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]
    torch.testing.assert_close(case.run().double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_one_poisoned_request_stays_alone() -> None:
    """NaN that a request has written itself reaches its own rows only."""
    case = Case([(1, 20), (1, 25), (4, 12), (6, 0)])
    case.full[1][3] = float("nan")
    case.cache[case.tables[1, 0], 3] = float("nan")
    case.query[6] = float("nan")  # first token of the last request; what comes of it is up to the kernel
    out, expected = case.run().double(), case.expected()
    assert out[1].isnan().all()
    clean = [0, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    torch.testing.assert_close(out[clean], expected[clean], atol=1e-5, rtol=1e-5)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 3))
def test_chunking_does_not_matter(chunks: list[int], block_size: int, seed: int) -> None:
    """A prompt computed chunk by chunk gives what it gives at once."""
    total = sum(chunks)
    case = Case([(total, 0)], block_size=block_size, seed=seed)
    cache = torch.full_like(case.cache, float("nan"))
    parts, done = [], 0
    for chunk in chunks:
        plan = plan_attention(
            np.array([chunk]), np.array([done + chunk]), case.tables, block_size, dtype=case.dtype, device=CPU
        )
        new = case.full[0][done : done + chunk]
        write_kv(cache, new, plan)
        parts.append(paged_attention(case.query[done : done + chunk], new, cache, plan))
        done += chunk
    torch.testing.assert_close(torch.cat(parts), case.run(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reversed_share", [0.5, 1.0])
def test_reversed_blocks_give_the_same_bits(reversed_share: float) -> None:
    lens = [(1, 63), (5, 13), (29, 0), (1, 1), (17, 40), (1, 0), (1, 15), (1, 16), (1, 499)]
    plain, turned = Case(lens), Case(lens)
    chosen = np.random.default_rng(0).random(turned.tables.shape) < reversed_share
    blocks = np.unique(turned.tables[chosen])
    are_reversed = np.isin(turned.tables, blocks)
    turned.cache[blocks] = turned.cache[blocks].flip(1)
    plan = plan_attention(
        turned.query_lens, turned.seq_lens, turned.tables, 16, are_reversed=are_reversed, dtype=turned.dtype, device=CPU
    )
    write_kv(turned.cache, turned.new, plan)
    assert torch.equal(paged_attention(turned.query, turned.new, turned.cache, plan), plain.run())
    turned.cache[blocks] = turned.cache[blocks].flip(1)
    assert torch.equal(turned.cache.nan_to_num(7.0), plain.cache.nan_to_num(7.0))

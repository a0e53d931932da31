"""Steps with a known answer, for every implementation of paged attention."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neaptide.kernels.choice import choose_kernels
from neaptide.kernels.paged_attention import AttentionPlanner, Shape, StepTables, write_kv

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

    def step_tables(self, are_reversed: npt.NDArray[np.bool_] | None = None) -> StepTables:
        """Each request's blocks alone, as an engine's step has them."""
        entries = 2 * self.tables + (0 if are_reversed is None else are_reversed)
        blocks = -(-self.seq_lens // self.block_size)
        return StepTables(entries[np.arange(entries.shape[1]) < blocks[:, None]], np.cumsum(blocks) - blocks)

    def planner(self, kernels: str) -> AttentionPlanner:
        heads, dim = self.query.shape[1:]
        shape = Shape(heads, self.kv_heads, dim, self.block_size)
        return choose_kernels(shape, dtype=self.dtype, device=CPU, cpu_kernels=kernels).plan_attention

    def run(self, kernels: str) -> Tensor:
        plan = self.planner(kernels)(self.query_lens, self.seq_lens, self.step_tables())
        write_kv(self.cache, self.new, plan)
        return plan.attend(self.query, self.new, self.cache)

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


def share(case: Case, request: int, owner: int, num_blocks: int) -> None:
    """The request's first blocks are the owner's, with what they hold."""
    case.tables[request, :num_blocks] = case.tables[owner, :num_blocks]
    num_tokens = num_blocks * case.block_size
    case.full[request][:num_tokens] = case.full[owner][:num_tokens]


def tree_with_chunks(**fields: Any) -> Case:
    """Four decodes share 6 blocks, two of them 5 more, and so does a short chunk; a long chunk has the 6, one decode
    has too little in common, and a stranger nothing."""
    case = Case([(1, 100), (1, 200), (1, 130), (1, 219), (1, 70), (30, 120), (1, 180), (9, 180)], **fields)
    for request, owner, num_blocks in [(1, 0, 6), (2, 0, 6), (3, 0, 6), (3, 1, 11), (4, 0, 1), (5, 0, 6), (7, 1, 11)]:
        share(case, request, owner, num_blocks)
    return case


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

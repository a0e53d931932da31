"""A batch's lines in chunks that servers claim: what shares a prefix stays together. Blocking; for a thread."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neaptide.cluster.claims import Chunk, ChunkKey, chunk_sizes
from neaptide.engine.arrays import IntArray
from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.prefix_tree import PrefixTree
from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.checking.job_files import JobPlan
from neaptide.server.batches.storing.models import BatchRecord, PendingLine

EXPECTED_OUTPUT_TOKENS = 256
"""Of an answer, before any has ended; at most what its line allows."""
SOME_DEVICE = DensityModel.in_seconds(1.0, 1e-3)
"""Where none is known yet. Only the order of densities counts, and which chunk is denser hardly depends on it."""


class Work(NamedTuple):
    """What lines ask of the device, by expected answers."""

    compute_s: float
    memory_s: float

    @property
    def density(self) -> float:
        return self.compute_s / self.memory_s if self.memory_s > 0 else self.compute_s


def work_of(lines: Sequence[PendingLine], plan: JobPlan, tokens: TokenFile, device: DensityModel) -> Work:
    """Each prompt counted in whole."""
    prompts, limits = (one.astype(np.float64) for one in _lengths(lines, plan, tokens))
    outputs = np.minimum(limits, EXPECTED_OUTPUT_TOKENS)
    return Work(float(device.compute_s(prompts, outputs).sum()), float(device.memory_s(prompts, outputs).sum()))


def longest_row(lines: Sequence[PendingLine], plan: JobPlan, tokens: TokenFile) -> int:
    """Tokens of prompt and answer that a server must hold to run all rows of the lines."""
    prompts, limits = _lengths(lines, plan, tokens)
    return int((prompts + limits).max(initial=0))


def _lengths(lines: Sequence[PendingLine], plan: JobPlan, tokens: TokenFile) -> tuple[IntArray, IntArray]:
    """[rows] tokens of the prompts, and the most that answers may have."""
    rows = np.array([row for line in lines for row in range(line.first_row, line.first_row + line.num_rows)], np.int64)
    limits = np.array([plan.params_table[plan.params_index[row]].max_tokens for row in rows.tolist()], np.int64)
    return tokens.lengths(rows), limits


def cut(
    record: BatchRecord, lines: Sequence[PendingLine], plan: JobPlan, stem: Path, device: DensityModel
) -> dict[Chunk, list[int]]:
    """Chunks of the lines, with each its line numbers."""
    if not lines:
        return {}
    tokens = TokenFile(stem)
    place = np.empty(len(tokens), np.int64)
    place[PrefixTree.load(stem, len(tokens)).rows] = np.arange(len(tokens))
    ordered = sorted(lines, key=lambda line: int(place[line.first_row]) if line.num_rows else -1)
    chunks: dict[Chunk, list[int]] = {}
    first = 0
    for chunk_no, size in enumerate(chunk_sizes(len(ordered))):
        part = ordered[first : first + size]
        first += size
        work = work_of(part, plan, tokens, device)
        known = work if device is not SOME_DEVICE else Work(0.0, 0.0)
        chunk = Chunk(ChunkKey(record.id, chunk_no), record.expires_at, work.density, size, *known)
        chunks[chunk] = [line.line_no for line in part]
    return chunks

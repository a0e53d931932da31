"""Cuts a batch's lines into chunks for leases: lines that share a prefix stay together. Blocking; for a thread."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neaptide.cluster.lease_order import ChunkKey, LeaseChunk, chunk_sizes
from neaptide.engine.arrays import IntArray
from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.prefix_tree import PrefixTree
from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.checking.job_files import JobPlan
from neaptide.server.batches.checking.needs import needed_tokens, row_lengths
from neaptide.server.batches.storing.models import BatchRecord, PendingLine

EXPECTED_OUTPUT_TOKENS = 256
"""Expected length of an answer before any has ended; at most what its line allows."""
SOME_DEVICE = DensityModel.in_seconds(1.0, 1e-3)
"""Stands in until the device is known. Only the order of densities counts, which hardly depends on the device."""


class ChunkWork(NamedTuple):
    """Time that lines take on the device, with expected answers."""

    compute_s: float
    memory_s: float

    @property
    def density(self) -> float:
        return self.compute_s / self.memory_s if self.memory_s > 0 else self.compute_s


def work_of(lines: Sequence[PendingLine], plan: JobPlan, tokens: TokenFile, device: DensityModel) -> ChunkWork:
    """Work of these lines; each prompt counts in full, whatever is cached."""
    prompts, limits = (one.astype(np.float64) for one in row_lengths(lines, plan, tokens))
    outputs = np.minimum(limits, EXPECTED_OUTPUT_TOKENS)
    return ChunkWork(float(device.compute_s(prompts, outputs).sum()), float(device.memory_s(prompts, outputs).sum()))


def cut(
    record: BatchRecord,
    lines: Sequence[PendingLine],
    plan: JobPlan,
    stem: Path,
    device: DensityModel,
    contexts: Sequence[int] = (),
) -> dict[LeaseChunk, list[int]]:
    """Cuts lines into chunks; returns the line numbers of each.

    Args:
        contexts: context lengths of all servers. No chunk has lines that fit into a short context together with lines
            that need a longer one.
    """
    if not lines:
        return {}
    tokens = TokenFile(stem)
    place = np.empty(len(tokens), np.int64)
    place[PrefixTree.load(stem, len(tokens)).rows] = np.arange(len(tokens))
    needed = needed_tokens(lines, plan, tokens)
    classes = np.searchsorted(np.unique(np.asarray(contexts, np.int64)), needed)
    places = np.array([place[line.first_row] if line.num_rows else -1 for line in lines], np.int64)
    ordered = np.lexsort([places, classes])
    chunks: dict[LeaseChunk, list[int]] = {}
    for part in _parts(ordered, classes):
        part_lines = [lines[index] for index in part]
        work = work_of(part_lines, plan, tokens, device)
        known = work if device is not SOME_DEVICE else ChunkWork(0.0, 0.0)
        key, longest = ChunkKey(record.id, len(chunks)), int(needed[part].max())
        chunk = LeaseChunk(key, record.deadline_at, work.density, len(part), *known, needs_tokens=longest)
        chunks[chunk] = [line.line_no for line in part_lines]
    return chunks


def _parts(ordered: IntArray, classes: IntArray) -> Iterator[IntArray]:
    """Yields the lines of each chunk: consecutive lines of one context class."""
    for of_class in np.split(ordered, np.flatnonzero(np.diff(classes[ordered])) + 1):
        yield from np.split(of_class, np.cumsum(chunk_sizes(len(of_class)))[:-1])

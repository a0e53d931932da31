"""Batches that are asked for: lines of bundled sets, at random moments of windows that the server has not seen."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from neaptide.durations import DAY_S
from neaptide.engine.arrays import FloatArray
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.server.quotes.work import BatchSize, DeviceTime, KnownBatch

TASKS = ("sharegpt_lengths", "arxiv_summarization_lengths", "bros-be-256")
"""Offline sets; a key's batches are of one of them."""
LIMIT_TOKENS = 1024
"""``max_tokens`` of every line."""
NUM_KNOWN = 10
"""Ended batches of the key."""
KNOWN_LINES = 500
LEAST_S, MOST_S = 60.0, 7200.0
"""Device time of the batches."""
LEAST_SPARE = 0.25
"""A window is long enough for its batch if chats leave this share."""
SEEN_DAYS = 3
"""Days that the server has recorded before the first window."""


@dataclass(slots=True)
class BatchTask:
    """Lines of one kind that a key submits."""

    name: str
    rows: list[TraceRequest]
    answers: FloatArray
    """[rows] lengths, cut at the limit."""

    def size(self, first: int, num_lines: int) -> BatchSize:
        tokens = sum(row.input_tokens for row in self.lines(first, num_lines))
        return BatchSize(num_lines, num_lines, tokens, tokens, (LIMIT_TOKENS,))

    def lines(self, first: int, num_lines: int) -> list[TraceRequest]:
        return [self.rows[(first + k) % len(self.rows)] for k in range(num_lines)]

    def mean_answer(self, first: int, num_lines: int) -> float:
        return float(self.answers[(first + np.arange(num_lines)) % len(self.answers)].mean())

    def known(self, rng: np.random.Generator) -> list[KnownBatch]:
        """Earlier batches of the key."""
        starts = rng.integers(len(self.rows), size=NUM_KNOWN).tolist()
        return [KnownBatch(self.mean_answer(first, KNOWN_LINES), KNOWN_LINES, 0.0) for first in starts]

    def job(self, first: int, num_lines: int, submitted_s: float) -> OfflineSet:
        """The batch as a job of a simulation, whose lines share nothing."""
        drawn = self.lines(first, num_lines)
        rows = [
            TraceRequest(
                0.0, ((row.segments[0][0] + (k // len(self.rows) << 20), row.input_tokens),), row.output_tokens
            )
            for k, row in enumerate(drawn)
        ]
        return OfflineSet(f"{self.name} {first}", rows, synthetic=False, share="asked", submitted_s=submitted_s)


def load_task(name: str) -> BatchTask:
    drawn = load_offline(name, seed=47).requests
    rows = [row for row in drawn if len(row.segments) == 1]
    answers = np.array([min(row.output_tokens, LIMIT_TOKENS) for row in rows], np.float64)
    return BatchTask(name, rows, answers)


@dataclass(slots=True, frozen=True)
class AskedBatch:
    """A batch whose end is asked for."""

    task: int
    """Number of its task."""
    first: int
    """First row of the task that it has."""
    num_lines: int
    window: int
    now_s: float
    """When it is asked for, from the start of the traffic."""


def asked_batches(
    tasks: Sequence[BatchTask], device: DeviceTime, end_s: float, count: int, rng: np.random.Generator
) -> Iterator[AskedBatch]:
    """Batches of mixed size and moment, evenly over the days after ``SEEN_DAYS``.

    Each begins early enough to end in its window at ``LEAST_SPARE``. So small ones come at any time of the day.
    """
    windows = range(SEEN_DAYS, int(end_s) // DAY_S)
    for k in range(count):
        number = int(rng.integers(len(tasks)))
        first, wanted_s = int(rng.integers(len(tasks[number].rows))), LEAST_S * (MOST_S / LEAST_S) ** rng.random()
        num_lines = lines_for(tasks[number], first, device, float(wanted_s))
        room_s = DAY_S - wanted_s / LEAST_SPARE
        window = windows[k % len(windows)]
        yield AskedBatch(number, first, num_lines, window, window * DAY_S + math.floor(rng.random() * room_s))


def lines_for(task: BatchTask, first: int, device: DeviceTime, wanted_s: float) -> int:
    """Number of lines that take about so much of the device."""
    each_s = device(task.size(first, 1000).work(task.mean_answer(first, 1000))) / 1000
    return max(round(wanted_s / each_s), 1)

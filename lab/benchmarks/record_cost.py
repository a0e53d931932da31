"""What the two records cost in time, in memory and on disk: the ring of 15 minutes of steps, and 14 days of aggregates.

A simulated engine runs chats beside batch work. Each of its steps goes through all that records it: the engine's
reporter, the server's ring, and the server's recorder of ten minutes. Then aggregates of busy periods are stored in a
database and read back, as quotes do. Times are processor time.

    python -m lab.benchmarks.record_cost [--seconds 10] [--days 14]

Prints a table, then one JSON line.
"""

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import print_table
from neaptide.durations import DAY_S
from neaptide.engine.messages import StepOutputs, ToEngine
from neaptide.engine.observer import EngineObserver
from neaptide.engine.record.step_reporter import StepReporter
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.stats import step_stats
from neaptide.engine.steps.step import Step
from neaptide.estimator.device_profile import load_profile
from neaptide.server.batches.storing import period_rows
from neaptide.server.batches.storing.store import Store
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.quotes.desk import ALONE
from neaptide.server.quotes.periods import MAX_KEYS, PERIOD_S, Period, PeriodRecorder, Saturated, period_decoder
from neaptide.server.why.steps import KEPT_S, MAX_BYTES, StepRing
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.quotes.replays import ready_of
from neaptide_lab.experiments.rivals.loads import CONV, PROFILE, scenario_of

MIB = 1 << 20
CHATS = 600
"""Chats of a busy period."""
PROMPT_TOKENS, ANSWER_TOKENS, SPREAD = 700, 150, 1.0
"""Medians of their lengths, and the deviation of the lengths' logarithms."""


class NoEngine:
    """A link that drops what it is sent."""

    def send(self, message: ToEngine) -> None:
        pass


@dataclass(slots=True, frozen=True)
class StepCost:
    """Processor time that recording one step took, in seconds."""

    requests: int
    """Requests in the step."""
    reporter_s: float
    """In the engine's process."""
    ring_s: float
    periods_s: float


class Records(EngineObserver):
    """Both records of a simulated engine."""

    def __init__(self) -> None:
        self.costs: list[StepCost] = []
        self.now_s = 0.0
        info, self._client = ready_of(load_profile(PROFILE)), EngineClient()
        self.ring = StepRing(self._client, lambda: self.now_s, max_bytes=sys.maxsize)
        self._client.attach(NoEngine(), info)
        self._periods = PeriodRecorder(info.block_size)
        self._periods.tick(0.0, is_up=True, is_paused=False)
        self._reporter: StepReporter | None = None
        self._planned_s = 0.0

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        if self._reporter is None:
            self._reporter = StepReporter(scheduler)
        begin_s = time.thread_time()
        self._reporter.planned(step, draft, scheduler)
        self._planned_s = time.thread_time() - begin_s

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        assert self._reporter is not None
        self.now_s = step.timer.end_s
        begin_s = time.thread_time()
        self._reporter.committed(step, result, scheduler)
        report = self._reporter.take(self.now_s)
        reporter_s = self._planned_s + time.thread_time() - begin_s
        outputs, stats = StepOutputs([], [], recent=report), step_stats(step, result, scheduler)
        begin_s = time.thread_time()
        self._client.on_message(outputs)
        told_s = time.thread_time()
        self._periods.on_step(stats)
        ring_s, periods_s = told_s - begin_s, time.thread_time() - told_s
        self.costs.append(StepCost(len(step.plan.rows), reporter_s, ring_s, periods_s))


def of_steps(seconds: float) -> dict[str, Any]:
    """Costs of each step of a simulated run."""
    load = replace(CONV, window_s=(600.0, 600.0 + seconds), warm_up_s=5.0)
    records = Records()
    simulate(replace(scenario_of(load), with_bounds=False), observers=[records])
    return summary(records.costs, records.ring.num_bytes, records.now_s)


def summary(costs: Sequence[StepCost], ring_bytes: int, length_s: float) -> dict[str, Any]:
    """
    Args:
        ring_bytes: bytes that the ring holds of the steps.
        length_s: time from the first step to the end of the last.
    """
    step_bytes = ring_bytes / len(costs)
    return {
        "steps": len(costs),
        "step_requests": statistics.median(one.requests for one in costs),
        "reporter_us": 1e6 * statistics.median(one.reporter_s for one in costs),
        # A mean: most reports are only kept, and now and then many are compressed.
        "ring_us": 1e6 * statistics.mean(one.ring_s for one in costs),
        "ring_bytes_per_step": step_bytes,
        "ring_mib": min(KEPT_S * len(costs) / length_s * step_bytes, MAX_BYTES) / MIB,
        "ring_most_mib": MAX_BYTES / MIB,
        "periods_step_us": 1e6 * statistics.median(one.periods_s for one in costs),
    }


def busy_period(start_s: int, rng: np.random.Generator) -> Period:
    """Ten minutes with as many keys as are counted by name, at a load that follows the time of day."""
    recorder = PeriodRecorder()
    recorder.tick(float(start_s), is_up=True, is_paused=False)
    lengths = [np.exp(rng.normal(math.log(median), SPREAD, CHATS)) for median in (PROMPT_TOKENS, ANSWER_TOKENS)]
    for number, (prompt, answer) in enumerate(zip(*lengths, strict=True)):
        recorder.on_request("default", f"{number % MAX_KEYS:08x}", int(prompt), int(answer))
    period = recorder.take()
    assert period is not None
    share = 0.4 + 0.3 * math.sin(2 * math.pi * start_s / DAY_S) + 0.1 * rng.random()
    period.seconds, period.steps, period.step_s = float(PERIOD_S), int(30_000 * share), PERIOD_S * share
    period.online_tokens, period.online_kv_tokens = int(sum(map(sum, lengths))), int(4e8 * share)
    period.offline_tokens, period.free_blocks, period.most_online_blocks = int(3e6), int(1.5e8), 4321
    half = {"steps": period.steps // 2, "online_tokens": period.online_tokens // 2, "row_steps": 1_234_567}
    period.saturated = Saturated(seconds=PERIOD_S / 2, prefill_tokens=987_654, decode_tokens=123_456, **half)
    return period


def recorded_periods(end_s: float, days: float) -> list[Period]:
    """The periods of some days until a moment."""
    rng, end = np.random.default_rng(0), int(end_s) // PERIOD_S * PERIOD_S
    count = int(days * DAY_S / PERIOD_S)
    return [busy_period(end - number * PERIOD_S, rng) for number in range(count, 0, -1)]


async def of_periods(days: float) -> dict[str, Any]:
    """Costs of the aggregates in a database."""
    periods = recorded_periods(days * DAY_S, days)
    with tempfile.TemporaryDirectory() as directory:
        store, times_s = Store(Path(directory)), []
        store.open()
        store.close()  # which leaves no write-ahead log
        before = _file_bytes(Path(directory))
        store.open()
        for period in periods:
            begin_s = time.process_time()
            await store.write_beside(period_rows.add_period, ALONE, period)
            times_s.append(time.process_time() - begin_s)
        begin_s = time.process_time()
        encoded = await store.read(period_rows.stored_periods, ALONE)
        read_s = time.process_time() - begin_s
        begin_s = time.process_time()
        decoded = [period_decoder.decode(one) for one in encoded]
        decode_s = time.process_time() - begin_s
        del decoded
        tracemalloc.start()
        kept = [period_decoder.decode(one) for one in encoded]
        decoded_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        store.close()
        disk_bytes = _file_bytes(Path(directory)) - before
    return {
        "periods": len(kept),
        "period_bytes": statistics.mean(map(len, encoded)),
        "disk_mib": disk_bytes / MIB,
        "store_ms": 1e3 * statistics.median(times_s),
        "read_ms": 1e3 * (read_s + decode_s),
        "decoded_mib": decoded_bytes / MIB,
    }


def _file_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    """Rows of the table: what was measured, and how much."""
    names = {
        "step_requests": "requests in a step",
        "reporter_us": "engine: a step, µs",
        "ring_us": "ring of steps: a step in the server, µs",
        "ring_bytes_per_step": "ring of steps: a step, bytes",
        "ring_mib": "ring of steps: 15 minutes of this load, MiB",
        "ring_most_mib": "ring of steps: its limit, MiB",
        "periods_step_us": "aggregates: a step in the server, µs",
        "period_bytes": "aggregates: ten minutes, bytes",
        "store_ms": "aggregates: storing ten minutes, ms",
        "disk_mib": "aggregates: all of them on disk, MiB",
        "read_ms": "aggregates: reading all for a quote, ms",
        "decoded_mib": "aggregates: memory of all while a quote is made, MiB",
    }
    return [[title, float(found[name])] for name, title in names.items()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of chats that are simulated")
    parser.add_argument("--days", type=float, default=14.0, help="of aggregates")
    args = parser.parse_args(argv)
    found = {**of_steps(args.seconds), **asyncio.run(of_periods(args.days))}
    print_table(f"{found['steps']} steps, {found['periods']} periods", ["record", "cost"], rows_of(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Echo's figures 8 and 10: running requests and memory by class over time, while the online load varies."""

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from neaptide.engine.kv.eviction import SEEN_ONLINE
from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.simulation.simulator import Run, simulate
from neaptide_lab.experiments.echo import load
from neaptide_lab.experiments.echo.load import OURS, OnlineLoad
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "echo-timeline"
ABOUT = "active requests and memory by class over time beside online load (Echo, figures 8 and 10)"

POLICIES = ("echo", OURS)
PAPER_HELD = 50.0
"""In percent: running requests hold more than this of the memory in most of the paper's iterations."""

Column = npt.NDArray[np.float64]
COLUMNS = ("end_s", "online", "offline", "held_online", "held_offline", "online_free", "offline_free", "empty")
MEMORY = COLUMNS[3:]


class Timeline(EngineObserver):
    """Notes after every step how many requests took part, and shares of the KV memory."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, ...]] = []

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        kv, plan = scheduler.kv, step.plan
        blocks, num_online = kv.occupancy(), int(plan.table.online[plan.rows].sum())
        seen_online = kv.num_cached_in(SEEN_ONLINE)
        parts = (blocks.online, blocks.offline, seen_online, blocks.cached - seen_online, blocks.free)
        shares = (part / kv.num_blocks for part in parts)
        self.lines.append((step.timer.executed_at_s, num_online, len(plan) - num_online, *shares))

    def columns(self, window_s: tuple[float, float]) -> dict[str, Column]:
        """Columns of the steps that ended in the window."""
        table = np.array(self.lines, np.float64).reshape(-1, len(COLUMNS))
        inside = (table[:, 0] > window_s[0]) & (table[:, 0] <= window_s[1])
        return dict(zip(COLUMNS, table[inside].T, strict=True))


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    online = OnlineLoad.of(load.BURST_QUICK if quick else load.BURST, logger)
    steps: dict[str, dict[str, Column]] = {}
    for policy in POLICIES:
        logger.info("policy %s", policy)
        watch = Timeline()
        one: Run = simulate(online.beside(policy, load.QUESTIONS), observers=[watch])
        steps[policy] = watch.columns(one.window_s)
    seconds = {policy: _by_second(columns) for policy, columns in steps.items()}
    data: dict[str, Any] = {
        "settings": online.settings(),
        "by_second": {policy: {name: column.tolist() for name, column in of.items()} for policy, of in seconds.items()},
    }
    notes = [
        *online.notes(),
        "Active are requests that compute in a step; the correlation is that of their means by second. The paper says "
        "that the offline ones change opposite to the online ones, and prints no number.",
        "Free memory of a class is cached: of online requests that have ended, and of offline ones. The paper says "
        f"that running requests hold more than {PAPER_HELD:g}% in most iterations: beside that stands the median.",
    ]
    return ExperimentResult(NAME, _rows(steps, seconds), notes, data, lambda figure: _plot(figure, seconds))


def _by_second(columns: dict[str, Column]) -> dict[str, Column]:
    """Means over the steps that ended in each second, of seconds with a step."""
    second = columns["end_s"].astype(np.int64)
    present, place = np.unique(second, return_inverse=True)
    counts = np.bincount(place, minlength=len(present))
    means = {name: np.bincount(place, columns[name], len(present)) / counts for name in COLUMNS[1:]}
    return {"second": present.astype(np.float64), **means}


def _correlation(first: Column, other: Column) -> float:
    """0 where one of them never changes."""
    if len(first) < 2 or not first.std() or not other.std():
        return 0.0
    return float(np.corrcoef(first, other)[0, 1])


def _rows(steps: dict[str, dict[str, Column]], seconds: dict[str, dict[str, Column]]) -> list[Row]:
    rows = []
    for policy in POLICIES:
        of, columns = seconds[policy], steps[policy]
        held = 100 * (columns["held_online"] + columns["held_offline"])
        rows += [
            Row(
                f"{policy}: correlation of active online and offline requests",
                _correlation(of["online"], of["offline"]),
            ),
            Row(
                f"{policy}: memory held by running requests, median", float(np.median(held)), PAPER_HELD, "%", digits=1
            ),
            Row(
                f"{policy}: steps in which they hold more than half", 100 * float((held > PAPER_HELD).mean()), None, "%"
            ),
        ]
        rows += [Row(f"{policy}: memory {name}, mean", 100 * float(columns[name].mean()), None, "%") for name in MEMORY]
    return rows


def _plot(figure: Any, seconds: dict[str, dict[str, Column]]) -> None:
    grid = figure.subplots(2, len(seconds), sharex=True, squeeze=False)
    for (active, memory), (policy, of) in zip(grid.T, seconds.items(), strict=True):
        active.plot(of["second"], of["online"], label="online")
        active.plot(of["second"], of["offline"], label="offline")
        active.set_title(policy)
        active.set_ylabel("active requests")
        active.legend()
        memory.stackplot(
            of["second"], *(100 * of[name] for name in MEMORY), labels=[n.replace("_", " ") for n in MEMORY]
        )
        memory.set_ylabel("KV memory, %")
        memory.set_xlabel("s")
        memory.legend()

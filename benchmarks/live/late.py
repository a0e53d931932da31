"""Explains late chats: divides the time of each one by cause, step by step, from its run's step log.

    python -m benchmarks.live.late KEPT/load-0.4-seed-0-beside [KEPT/load-0.4-seed-0-alone ...]

``--keep KEPT`` of ``benchmarks.live_coserving`` and ``benchmarks.same_kernels`` writes the input: for our runs, the
step log and the clients' records. The log is replayed. For every step, the engine's cost model as of then predicts the
time of its online decodes alone, then with the online prompts, then with everything. Each addition is that work's part
of the step. The rest of the step's time is due to the machine or the model. The parts of a chat sum up to the time
that its client saw, to the microsecond.

The last lines say how many late chats would have been in time without each part. If no single part would do, the load
is too high for the targets, or several parts came together.
"""

import argparse
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks.common import print_table
from benchmarks.live.plan import Case, Plan, Targets, Window
from benchmarks.live.run import run
from neaptide.engine.arrays import IntArray
from neaptide.engine.messages import StepOutputs
from neaptide.engine.observer import EngineObserver
from neaptide.engine.record.step_log import AddLine, StepLine, read_log
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape, StepPlan
from neaptide.engine.steps.step import Step
from neaptide.executors.simulated.trace_executor import StepTally
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.simulation.measures import Measures, OnlineRecord
from neaptide.simulation.replay import replay

LOG_SUFFIX, CHATS_SUFFIX = ".steps.jsonl", ".chats.json"
COLUMNS = ("before", "decodes", "prompts", "offline", "beyond", "between", "way")
"""Columns of the table, in the order of ``Parts``."""


class SeenChat(msgspec.Struct, frozen=True):
    """A chat as its client saw it. Seconds on the clock of this machine, which is also the engine's."""

    arrival_s: float
    """Seconds from the start of the run."""
    due_s: float
    sent_s: float
    first_s: float | None
    last_s: float | None
    num_tokens: int
    is_in_time: bool

    @classmethod
    def of(cls, record: ChatRecord, targets: Targets) -> "SeenChat":
        times_s = record.token_times_s or [None]
        count = max(record.num_output_tokens, len(record.token_times_s))
        is_in_time = record.met(targets.ttft_s, targets.tpot_s)
        return cls(record.arrival_s, record.start_s, record.sent_s, times_s[0], times_s[-1], count, is_in_time)

    @property
    def record(self) -> ChatRecord:
        """The client's record, as far as it is known here."""
        times_s = [at_s for at_s in (self.first_s, self.last_s)[: self.num_tokens] if at_s is not None]
        error = None if self.is_in_time else "late"
        record = ChatRecord(self.sent_s, self.arrival_s, self.due_s, times_s, error=error)
        record.num_output_tokens = self.num_tokens
        return record


class SeenRun(msgspec.Struct, frozen=True):
    ttft_slo_s: float
    tpot_slo_s: float
    chats: list[SeenChat]
    """Chats of the measurement window."""
    early: list[SeenChat] = []
    """Chats before the window."""
    clock_s: tuple[float, float] = (0.0, 0.0)
    """Begin and end of the window, on the engine's clock."""
    online_tokens_per_s: float = 0.0
    offline_tokens_per_s: float = 0.0

    @classmethod
    def of(cls, window: Window, targets: Targets) -> "SeenRun":
        chats, early = ([SeenChat.of(one, targets) for one in those] for those in (window.records, window.early))
        tokens_per_s = window.online_tokens_per_s, window.offline_tokens_per_s
        return cls(targets.ttft_s, targets.tpot_s, chats, early, window.clock_s, *tokens_per_s)

    @property
    def targets(self) -> Targets:
        return Targets(self.ttft_slo_s, self.tpot_slo_s)

    @property
    def window(self) -> Window:
        """The window, as far as it is known here."""
        return Window(
            online_tokens_per_s=self.online_tokens_per_s,
            offline_tokens_per_s=self.offline_tokens_per_s,
            clock_s=self.clock_s,
            records=[chat.record for chat in self.chats],
            early=[chat.record for chat in self.early],
        )


async def run_kept(path: Path | None, plan: Plan, flags: list[str], targets: Targets, *, offline: bool) -> Window:
    """A run with online work. If there is a ``path``, its step log and its clients' records are kept there."""
    log = None if path is None else log_of(path)
    window = await run(plan, flags, online=True, offline=offline, step_log=log)
    if path is not None:
        keep(path, window, targets)
    return window


def kept_in(text: str) -> Path:
    """The directory of ``--keep``, made if necessary. The path is absolute, because engines may have another working
    directory."""
    directory = Path(text).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def path_of(directory: Path, case: Case, seed: int, name: str) -> Path:
    """Path of a run's files, without the suffixes."""
    shape = "" if case.shape == Case(case.load).shape else f"-{case.shape}"
    return directory / f"load-{case.load:g}{shape}-seed-{seed}-{name}"


def keep(path: Path, window: Window, targets: Targets) -> None:
    """Writes the clients' records next to the step log of the same ``path``."""
    chats_of(path).write_bytes(msgspec.json.encode(SeenRun.of(window, targets)))


def log_of(path: Path) -> Path:
    return path.with_name(path.name + LOG_SUFFIX)


def chats_of(path: Path) -> Path:
    return path.with_name(path.name + CHATS_SUFFIX)


def seen_of(path: Path) -> SeenRun:
    return msgspec.json.decode(chats_of(path).read_bytes(), type=SeenRun)


class Parts(NamedTuple):
    """Seconds by cause."""

    step_before: float = 0.0
    """Rest of the step that was running when the request arrived."""
    online_decodes: float = 0.0
    online_prompts: float = 0.0
    """Includes the chat's own prompt."""
    offline_work: float = 0.0
    beyond_prediction: float = 0.0
    """Negative if steps were shorter."""
    between_steps: float = 0.0
    """Planning, committing, messages."""
    on_the_way: float = 0.0
    """Between client and engine, in both directions."""

    def plus(self, other: "Parts") -> "Parts":
        return Parts(*map(sum, zip(self, other, strict=True)))

    def times(self, factor: float) -> "Parts":
        return Parts(*(factor * part for part in self))


class StepTime(NamedTuple):
    """Times of one step in seconds."""

    begin_s: float
    """When the engine began to plan it."""
    run_s: float
    """When it was planned and the step before it had ended."""
    end_s: float
    decodes_s: float
    """Predicted for its online decodes alone."""
    prompts_s: float
    """Predicted addition of its online prompts."""
    offline_s: float
    """Predicted addition of its offline work."""

    @property
    def parts(self) -> Parts:
        predicted_s = self.decodes_s + self.prompts_s + self.offline_s
        beyond_s = self.end_s - self.run_s - predicted_s
        return Parts(0.0, self.decodes_s, self.prompts_s, self.offline_s, beyond_s)


def taken_apart(steps: Sequence[StepTime], begin_s: float, end_s: float) -> Parts:
    """Divides the time between ``begin_s`` and ``end_s``, the end of a step, by cause."""
    ends_s = [step.end_s for step in steps]
    found, at_s = Parts(), begin_s
    for step in steps[bisect_right(ends_s, begin_s) : bisect_right(ends_s, end_s)]:
        if step.begin_s < begin_s:
            found = found.plus(Parts(step_before=step.end_s - at_s))
        else:
            found = found.plus(step.parts).plus(Parts(between_steps=step.run_s - at_s))
        at_s = step.end_s
    return found


class Predictions(EngineObserver):
    """Predictions by step: its online decodes, the addition of its online prompts, and the addition of its offline
    work."""

    def __init__(self) -> None:
        self.of_step: dict[int, tuple[float, float, float]] = {}

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        plan, predict = step.plan, scheduler.cost_model.predict
        online = plan.table.online[plan.rows]
        decodes = online & (plan.num_tokens == 1) & (plan.num_computed > 0)
        decodes_s, online_s = (
            predict(_shape(plan, np.flatnonzero(mask))).seconds if mask.any() else 0.0 for mask in (decodes, online)
        )
        # Each kind of step has its own fit, so an inaccurate one may predict more time for less work.
        online_s = min(online_s, plan.predicted_s)
        decodes_s = min(decodes_s, online_s)
        self.of_step[plan.step] = decodes_s, online_s - decodes_s, plan.predicted_s - online_s


def _shape(plan: StepPlan, parts: IntArray) -> BatchShape:
    shape = BatchShape()
    for part in parts.tolist():
        shape.add(int(plan.num_tokens[part]), int(plan.num_computed[part]))
    return shape


@dataclass(slots=True)
class Logged:
    """The engine's work, according to its log."""

    steps: list[StepTime]
    chats: list[OnlineRecord]
    """By arrival."""
    difference: str | None
    """First difference found by the replay, which ends there."""


def read(log: Path) -> Logged:
    """Reads and replays a log. Raises ValueError if it is damaged."""
    steps: list[StepTime] = []
    measures, predictions = Measures(), Predictions()
    for line in read_log(log):
        if isinstance(line, AddLine):
            measures.arrived(line.id, line.arrival_s)

    def take(line: StepLine, outputs: StepOutputs) -> None:
        before_s = steps[-1].end_s if steps else -math.inf
        start_s, *planned_s, end_s = line.t
        run_s = max((planned_s or [start_s])[0], before_s)
        steps.append(StepTime(max(start_s, before_s), run_s, end_s, *predictions.of_step.pop(line.step)))
        measures.step(outputs, StepTally(), 0, end_s)

    difference = replay(log, on_step=take, observers=[predictions]).difference
    chats = sorted(measures.online.values(), key=lambda chat: chat.arrival_s)
    return Logged(steps, chats, difference)


class Half(NamedTuple):
    """Either the first token of a chat, or the pace of the tokens after it."""

    arrival_s: float
    what: str
    seconds: float
    """Until the first token, or for each later token."""
    target_s: float
    parts: Parts

    @property
    def is_late(self) -> bool:
        return self.seconds > self.target_s


def halves(seen: SeenRun, logged: Logged) -> Iterator[Half]:
    """The halves of every chat that the log covers to its end. A chat matches the first one that the engine got after
    it was sent."""
    arrivals_s = [chat.arrival_s for chat in logged.chats]
    next_one = 0
    for chat in sorted(seen.chats, key=lambda chat: chat.sent_s):
        next_one = index = bisect_left(arrivals_s, chat.sent_s, next_one)
        next_one += 1
        if index == len(arrivals_s) or chat.first_s is None or chat.last_s is None:
            continue
        known = logged.chats[index]
        if math.isinf(known.first_s):
            continue
        seconds = chat.first_s - chat.due_s
        way_s = seconds - (known.first_s - known.arrival_s)
        parts = taken_apart(logged.steps, known.arrival_s, known.first_s).plus(Parts(on_the_way=way_s))
        yield Half(chat.arrival_s, "first token", seconds, seen.ttft_slo_s, parts)
        if chat.num_tokens > 1:
            whole_s, each = chat.last_s - chat.first_s, 1 / (chat.num_tokens - 1)
            way_s = whole_s - (known.last_s - known.first_s)
            parts = taken_apart(logged.steps, known.first_s, known.last_s).plus(Parts(on_the_way=way_s))
            yield Half(chat.arrival_s, "each token", whole_s * each, seen.tpot_slo_s, parts.times(each))


def in_time_without(late: Sequence[Half]) -> dict[str, int]:
    """For each part, how many late chats would have met both targets without it."""
    by_chat: dict[float, list[Half]] = {}
    for half in late:
        by_chat.setdefault(half.arrival_s, []).append(half)
    return {
        name: sum(all(half.seconds - half.parts[part] <= half.target_s for half in chat) for chat in by_chat.values())
        for part, name in enumerate(Parts._fields)
    }


def report(path: Path) -> None:
    """Prints why the chats of one run were late, in order of arrival, and medians of the chats in time."""
    seen, logged = seen_of(path), read(log_of(path))
    found = list(halves(seen, logged))
    late = [half for half in found if half.is_late]
    num_late = sum(not chat.is_in_time for chat in seen.chats)
    title = f"{path.name}: {num_late} of {len(seen.chats)} chats late"
    title += f" (targets {1e3 * seen.ttft_slo_s:.0f} and {1e3 * seen.tpot_slo_s:.0f} ms)"
    columns = ["ms", "all", *COLUMNS]
    rows = [_row(f"{half.what}, {half.arrival_s:.2f} s", half.seconds, half.parts) for half in late]
    for what in ("first token", "each token"):
        if good := [half for half in found if half.what == what and not half.is_late]:
            medians = Parts(*map(median, zip(*(half.parts for half in good), strict=True)))
            rows.append(_row(f"{what}, {len(good)} in time", median(half.seconds for half in good), medians))
    print_table(title, columns, rows)
    explained = len({half.arrival_s for half in late})
    print(f"replayed {len(logged.steps)} steps: {logged.difference or 'all decisions are the same'}")
    print(f"late, and covered to the end: {explained}; of these, in time without")
    for name, count in in_time_without(late).items():
        print(f"  {name.replace('_', ' ')}: {count}")


def _row(name: str, seconds: float, parts: Parts) -> list[str]:
    return [name, *(f"{round(1e3 * value, 1) + 0.0:.1f}" for value in (seconds, *parts))]  # no negative zero


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="KEPT/RUN", help="path of a kept run, without the suffixes"
    )
    for path in parser.parse_args().runs:
        report(path)


if __name__ == "__main__":
    main()

"""Whether quotes hold: batches beside two weeks of chats, in windows that the server has not seen.

Quotes know the record until the moment of asking. What happens is the fluid model's end with the loads that really
follow and the answers that the batch really has. Some batches are replayed whole, which shows how far the fluid model
is off; the other ends count as off by each of these errors in turn. The efficiency comes from three more replays of
each traffic, one of each task, as a server learns it from its keys' batches.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neaptide.durations import DAY_S
from neaptide.engine.messages import EngineReady
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.launch.device_time import device_time
from neaptide.server.quotes.fluid import DAY_PERIODS, LoadPaths, finish_times
from neaptide.server.quotes.periods import Period
from neaptide.server.quotes.quote import Quote, QuoteInputs, outlook, quote
from neaptide.server.quotes.work import DeviceTime, Efficiency, chat_loads, chats_lag_s, learnt_efficiency
from neaptide_lab.experiments.quotes.batches import (
    TASKS,
    AskedBatch,
    BatchTask,
    asked_batches,
    lines_for,
    load_task,
)
from neaptide_lab.experiments.quotes.replays import BEFORE_S, ReplayedBatch, ready_of, replayed
from neaptide_lab.experiments.quotes.traffic import BIN_S, KINDS, ChatTraffic, TrafficKind
from neaptide_lab.experiments.result import ExperimentResult, Row
from neaptide_lab.experiments.rivals.kept import KeptRuns, code_digest
from neaptide_lab.experiments.rivals.loads import PROFILE

NAME = "quotes"
ABOUT = "whether batches end when their quotes say, in windows that the server has not seen, and as whole replays do"

MEAN_LOAD = 0.4
"""Share of the device that chats take on average over all days."""
WINDOWS_S = (3600.0, 6 * 3600.0, 24 * 3600.0)
LEARNING_S = 240.0
"""Device time of each batch from which the efficiency is learnt."""
LEARNT_PERIODS = 6
"""Periods of a day of the record that are as in one of these batches: an hour of batch work a day."""
REPLAY_BEYOND = 1.25
"""Chats of a replay, as a multiple of the time that the fluid model says."""
P90_COVERS, P50_COVERS = (0.85, 0.95), (0.4, 0.6)
MOST_MARGIN = 0.5
LARGEST_ERROR = 0.1
SEED = 49
"""What quotes count was chosen on seeds 47 and 48."""


@dataclass(slots=True, frozen=True)
class QuotesSize:
    kinds: tuple[TrafficKind, ...]
    batches: int
    """Batches of each traffic that are asked for."""
    replays: int
    """Batches of each traffic that are replayed."""
    most_replayed_s: float
    """Device time of the largest of them."""
    learning_s: float = LEARNING_S


FULL = QuotesSize(KINDS, 40, 4, 400.0)
QUICK = QuotesSize(KINDS[2:4], 20, 1, 75.0, 60.0)


@dataclass(slots=True)
class QuotedCase:
    """A quoted batch and what happened. Times are in seconds from the moment of asking."""

    traffic: str
    asked: AskedBatch
    found: Quote
    spare_s: float
    """End by the mean spare rate of the record."""
    real_s: float
    """End by the fluid model on the real loads."""
    replay: ReplayedBatch | None = None

    @property
    def error(self) -> float | None:
        """How much later the replay ended than the fluid model says, as a share."""
        if self.replay is None:
            return None
        return math.inf if self.replay.took_s is None else self.replay.took_s / self.real_s - 1.0

    @property
    def p50_s(self) -> float:
        return self.found.windows[-1].p50_s

    @property
    def p90_s(self) -> float:
        return self.found.windows[-1].p90_s

    def refused_wrongly(self) -> list[float]:
        """The windows in which the batch would have ended although its quote says that it cannot."""
        end_s = self.real_s if self.replay is None or self.replay.took_s is None else self.replay.took_s
        return [one.window_s for one in self.found.windows if outlook(one) == "infeasible" and end_s <= one.window_s]


def run(quick: bool) -> ExperimentResult:
    return run_kept(quick, KeptRuns(ReplayedBatch))


def run_kept(quick: bool, kept: KeptRuns[ReplayedBatch]) -> ExperimentResult:
    """``run``, which goes on from the replays that were kept and keeps those that it runs."""
    size = QUICK if quick else FULL
    profile = load_profile(PROFILE)
    tasks = [load_task(name) for name in TASKS]
    cases: list[QuotedCase] = []
    for kind in size.kinds:
        cases += _TrafficQuotes(kind, profile, tasks, size, kept).cases()
    return ExperimentResult(
        NAME, rows_of(cases, judged=not quick), _notes(size), {"cases": [_data(one) for one in cases]}, against="bound"
    )


class _TrafficQuotes:
    """Quotes beside one kind of traffic."""

    def __init__(
        self,
        kind: TrafficKind,
        profile: DeviceProfile,
        tasks: Sequence[BatchTask],
        size: QuotesSize,
        kept: KeptRuns[ReplayedBatch],
    ) -> None:
        logging.getLogger(__name__).info("%s", kind.name)
        self._profile, self._tasks, self._size, self._kept = profile, tasks, size, kept
        self._info: EngineReady = ready_of(profile)
        device, least = device_time(self._info), device_time(self._info, 1.0, 1.0)
        assert device is not None
        assert least is not None
        self._device: DeviceTime = device
        self._least: DeviceTime = least
        """Sizes batches, so that they do not change with what quotes count."""
        self._chats = ChatTraffic(kind, self._info, MEAN_LOAD, SEED)
        self._rng = np.random.default_rng([SEED, len(kind.name), *kind.name.encode()])
        self._code = code_digest(("experiments/quotes/replays.py", "experiments/quotes/traffic.py"))

    def cases(self) -> list[QuotedCase]:
        learnt = self._learnt()
        asked = list(asked_batches(self._tasks, self._least, self._chats.end_s, self._size.batches, self._rng))
        found = [self._case(one, learnt) for one in asked]
        left = self._size.replays
        for case in found:
            if left and self._least_s(case.asked) <= self._size.most_replayed_s:
                case.replay = self._replay(case.asked, case.real_s)
                left -= 1
        return found

    def _least_s(self, asked: AskedBatch) -> float:
        task = self._tasks[asked.task]
        work = task.size(asked.first, asked.num_lines).work(task.mean_answer(asked.first, asked.num_lines))
        return self._least(work)

    def _learnt(self) -> list[Period]:
        """What the record has of an hour of batch work in each of the first days: of a replay, many times."""
        found = []
        for number, task in enumerate(self._tasks):
            now_s = float(number * DAY_S + self._rng.integers(int(BEFORE_S), DAY_S))
            asked = AskedBatch(number, 0, lines_for(task, 0, self._least, self._size.learning_s), number, now_s)
            found.append(self._replay(asked, self._real_s(asked, Efficiency(1.0, 1.0, 0.0), 0.0)).record)
        return found

    def _case(self, asked: AskedBatch, learnt: Sequence[Period]) -> QuotedCase:
        task = self._tasks[asked.task]
        periods = _with_batches(self._chats.record(asked.now_s), learnt, self._chats.length_buckets())
        question = QuoteInputs(
            now_s=asked.now_s,
            periods=periods,
            info=self._info,
            device=self._device,
            pool=(),
            key="asked",
            known=task.known(self._rng),
            weights={},
        )
        found = quote(task.size(asked.first, asked.num_lines), question, WINDOWS_S)
        loads, _ = chat_loads(periods, self._info)
        efficiency = learnt_efficiency(periods, self._info, self._device)
        spare = float(np.nanmean(np.maximum(1.0 - efficiency.chat_factor * loads, 0.0))) * efficiency.mean
        real_s = self._real_s(asked, efficiency, chats_lag_s(periods, self._info))
        return QuotedCase(self._chats.kind.name, asked, found, found.work_s[0] / spare, real_s)

    def _real_s(self, asked: AskedBatch, efficiency: Efficiency, lag_s: float) -> float:
        """When the batch ends by the fluid model, with its own answers and the loads that follow."""
        task = self._tasks[asked.task]
        work = task.size(asked.first, asked.num_lines).work(task.mean_answer(asked.first, asked.num_lines))
        loads, first_s = self._chats.loads_from(asked.now_s)
        path = LoadPaths(efficiency.chat_factor * loads[None, :], first_s, float(BIN_S), True, lag_s)
        return float(finish_times(path, np.array([self._device(work)]), np.array([efficiency.mean]))[0])

    def _replay(self, asked: AskedBatch, fluid_s: float) -> ReplayedBatch:
        task = self._tasks[asked.task]
        name = f"{self._chats.kind.name} {task.name} {asked.first} {asked.num_lines} {asked.now_s} {MEAN_LOAD}"
        logging.getLogger(__name__).info("%s, %d lines of %s", self._chats.kind.name, asked.num_lines, task.name)

        def simulated() -> ReplayedBatch:
            chats = self._chats.requests(asked.now_s - BEFORE_S, asked.now_s + REPLAY_BEYOND * fluid_s)
            return replayed(self._profile, chats, task.job(asked.first, asked.num_lines, BEFORE_S))

        return self._kept.run(name, self._code, 0.0, simulated)


def _with_batches(
    periods: list[Period], learnt: Sequence[Period], lengths: tuple[dict[int, int], dict[int, int]]
) -> list[Period]:
    """The record with batch work in the first hour of each of the first days."""
    for day, of_day in enumerate(learnt):
        for one in periods[day * DAY_PERIODS :][:LEARNT_PERIODS]:
            one.steps, one.step_s, one.saturated = of_day.steps, of_day.step_s, of_day.saturated
            one.prompt_tokens, one.answer_tokens = lengths
    return periods


def rows_of(cases: Sequence[QuotedCase], *, judged: bool) -> list[Row]:
    """The figures over all cases. Only full samples are judged."""

    def judge(found: bool) -> bool | None:
        return found if judged else None

    errors = [one.error for one in cases if one.error is not None]
    covers50, covers90 = covered(cases, errors)
    ours_s = float(np.mean([one.p90_s - one.real_s for one in cases]))
    spare_s = spare_margin_s(cases, float(np.mean([one.real_s <= one.p90_s for one in cases])))
    wrongly = sum(len(one.refused_wrongly()) for one in cases)
    rows = [
        Row("batches quoted", float(len(cases)), digits=0),
        Row("windows", float(len({(one.traffic, one.asked.window) for one in cases})), digits=0),
        _share("ended by p90", covers90, P90_COVERS, judge),
        _share("ended by p50", covers50, P50_COVERS, judge),
        Row("p90 less the end, mean", ours_s, digits=0, unit="s"),
        Row("the same by the mean spare rate", spare_s, digits=0, unit="s"),
        Row(
            "ratio of the two",
            ours_s / spare_s if spare_s else math.inf,
            MOST_MARGIN,
            holds=judge(ours_s <= MOST_MARGIN * spare_s),
        ),
        Row("windows refused wrongly", float(wrongly), 0.0, digits=0, holds=judge(not wrongly)),
    ]
    if errors:
        near = sum(abs(error) <= LARGEST_ERROR for error in errors)
        rows += [
            Row("replays within 10%", float(near), float(len(errors)), digits=0, holds=judge(near == len(errors))),
            Row("earliest replay", 100 * min(errors), unit="%", digits=1),
            Row("latest replay", 100 * max(errors), unit="%", digits=1),
        ]
    for name in dict.fromkeys(one.traffic for one in cases):
        own = covered([one for one in cases if one.traffic == name], errors)
        rows.append(Row(f"{name}: ended by p90", 100 * own[1], unit="%", digits=1))
    return rows


def _share(case: str, share: float, wanted: tuple[float, float], judge: Callable[[bool], bool | None]) -> Row:
    return Row(case, 100 * share, 50 * sum(wanted), "%", 1, judge(wanted[0] <= share <= wanted[1]))


def spare_margin_s(cases: Sequence[QuotedCase], covers: float) -> float:
    """Mean of quote less end for quotes by the mean spare rate, stretched so that as many batches end in time.

    The factor is chosen afterwards, which flatters them.
    """
    factors = np.sort([one.real_s / one.spare_s for one in cases])
    factor = float(factors[max(math.ceil(covers * len(factors) - 1e-9) - 1, 0)])
    return float(np.mean([factor * one.spare_s - one.real_s for one in cases]))


def covered(cases: Sequence[QuotedCase], errors: Sequence[float]) -> tuple[float, float]:
    """Shares that end by p50 and by p90, if every end of the fluid model is off as the replays were, in turn."""
    finite = [error for error in errors if math.isfinite(error)] or [0.0]
    ends = [(one, one.real_s * (1.0 + error)) for one in cases for error in finite]
    return (
        float(np.mean([end_s <= one.p50_s for one, end_s in ends])),
        float(np.mean([end_s <= one.p90_s for one, end_s in ends])),
    )


def _notes(size: QuotesSize) -> list[str]:
    return [
        f"{PROFILE}; chats take {MEAN_LOAD:.0%} of the device on average. The end is that of the fluid model on the "
        "loads that really follow, by the minute, off by the errors of the replays in turn.",
        f"Replayed are the first batches of each traffic of at most {size.most_replayed_s:.0f} s of the device, with "
        "their chats. The efficiency is that of one more replay of each task in the first days.",
        "The quote by the mean spare rate is stretched by one factor, chosen afterwards so that it covers as many.",
    ]


def _data(one: QuotedCase) -> dict[str, Any]:
    finite = {"p50_s": one.p50_s, "p90_s": one.p90_s, "real_s": one.real_s, "spare_s": one.spare_s}
    return {
        "traffic": one.traffic,
        "task": TASKS[one.asked.task],
        "lines": one.asked.num_lines,
        "at_s": one.asked.now_s,
        "work_s": one.found.work_s[0],
        **{name: value if math.isfinite(value) else None for name, value in finite.items()},
        "replay_s": one.replay.took_s if one.replay is not None else None,
        "attained": one.replay.attained if one.replay is not None else None,
    }

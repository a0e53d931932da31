"""Whether the parts of ``neaptide why`` explain late chats: they add up, and a run without batch work agrees."""

import logging
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from neaptide.engine.messages import ToEngine
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason
from neaptide.engine.record.step_reporter import StepReporter
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.server.why.parts import Cause, StepsAround, TokenWait, parts_of
from neaptide.server.why.sentences import largest, sentence
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.result import ExperimentResult, Row
from neaptide_lab.experiments.rivals.loads import CONV, LOADS, PROFILE, Load, scenario_of

NAME = "why-late"
ABOUT = "whether the parts of late chats add up to their lateness, and what a run without batch work says"

CODE = LOADS[1]
POLICIES = ("neaptide", "priority")
NUM_LATE = 50
TTFT_SLO_S = 0.2
"""Far below the loads' own target, so that chats are late under every policy."""
LARGEST_MISSING = 0.05
SHOWN = 3
BACK_S = 10.0


@dataclass(slots=True, frozen=True)
class ToldChat:
    """A late chat, explained. Times are in seconds."""

    wait: TokenWait
    sentence: str
    cause: Cause
    missing: float
    """Share of the lateness that no named part explains."""
    without_batch_s: float


class _Chats(EngineObserver):
    """Records the steps of a simulated engine, and the first tokens of its chats."""

    def __init__(self) -> None:
        self._reporter: StepReporter | None = None
        self._early: list[tuple[ToEngine, float]] = []
        """Messages before the first step, which is the first to tell of the scheduler."""
        self.first_tokens: dict[str, tuple[float, float, int]] = {}
        """By request: arrival, first token, prompt tokens that were not cached."""

    def message(self, message: ToEngine, now_s: float) -> None:
        if self._reporter is None:
            self._early.append((message, now_s))
        else:
            self._reporter.message(message, now_s)

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        if self._reporter is None:
            self._reporter = StepReporter(scheduler)
            for message, now_s in self._early:
                self._reporter.message(message, now_s)
        self._reporter.planned(step, draft, scheduler)

    def undone(self, step: Step) -> None:
        assert self._reporter is not None
        self._reporter.undone(step)

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        assert self._reporter is not None
        self._reporter.committed(step, result, scheduler)

    def given_up(self, step: Step, scheduler: Scheduler) -> None:
        assert self._reporter is not None
        self._reporter.given_up(step, scheduler)

    def ended(self, request: Request, reason: FinishReason) -> None:
        if request.is_online and request.first_token_s > 0:
            new_tokens = request.num_prompt_tokens - request.num_cached_tokens
            self.first_tokens[request.request_id] = request.arrival_s, request.first_token_s, new_tokens

    def around(self) -> StepsAround:
        assert self._reporter is not None
        report = self._reporter.take(0.0)
        assert report is not None
        ids = {number: name for step in report.steps for number, name in step.admitted}
        taken_s = {name: seconds for name, seconds, _ in report.taken}
        return StepsAround(report.steps, taken_s, ids, report.block_size, since_s=0.0)


def run(quick: bool) -> ExperimentResult:
    loads = tuple(replace(load, window_s=window_s, warm_up_s=10.0) for load, window_s in _windows(quick))
    rows: list[Row] = []
    notes: list[str] = []
    data: dict[str, Any] = {"settings": {"profile": PROFILE, "ttft_slo_s": TTFT_SLO_S, "late_chats": NUM_LATE}}
    for load in loads:
        scenario = replace(scenario_of(load), ttft_slo_s=TTFT_SLO_S, with_bounds=False)
        for policy in POLICIES:
            logging.getLogger(__name__).info("%s, %s", load.title, policy)
            told, alone = _explained(replace(scenario, policy=policy))
            title = f"{load.title}, {policy}"
            rows += _rows(title, told, alone)
            notes += [f"{title}: {one.sentence}" for one in told[:: max(len(told) // SHOWN, 1)][:SHOWN]]
            data[title] = [
                {"sentence": one.sentence, "cause": one.cause, "missing": one.missing, "late_s": one.wait.late_s}
                for one in told
            ]
    return ExperimentResult(NAME, rows, notes, data, against="run without batch work")


def _windows(quick: bool) -> list[tuple[Load, tuple[float, float]]]:
    length_s = 15.0 if quick else 120.0
    return [(load, (start_s, start_s + length_s)) for load, start_s in ((CONV, 600.0), (CODE, 1133.0))]


def _explained(scenario: Scenario) -> tuple[list[ToldChat], list[float | None]]:
    """Fifty late chats of a run, evenly spread, and the first-token times of the same chats without batch work."""
    chats, alone = _Chats(), _Chats()
    simulate(scenario, observers=[chats])
    simulate(replace(scenario, offline=()), observers=[alone])
    late = [
        TokenWait(
            request_id=name,
            start_s=arrival_s,
            end_s=first_s,
            target_s=scenario.ttft_slo_s,
            new_prompt_tokens=new_tokens,
            sent_s=arrival_s,
            first_token_s=first_s,
        )
        for name, (arrival_s, first_s, new_tokens) in chats.first_tokens.items()
        if first_s - arrival_s > scenario.ttft_slo_s
    ]
    chosen = late[:: max(len(late) // NUM_LATE, 1)][:NUM_LATE]
    around = chats.around()
    without = [alone.first_tokens.get(wait.request_id) for wait in chosen]
    return [_told(wait, around) for wait in chosen], [None if one is None else one[1] - one[0] for one in without]


def _told(wait: TokenWait, around: StepsAround) -> ToldChat:
    near = [one for one in around.steps if wait.start_s - BACK_S <= one.end_s <= wait.end_s]
    parts = parts_of(wait, replace(around, steps=near))
    late = parts.lateness(wait.late_s)
    return ToldChat(
        wait,
        sentence(wait, parts),
        largest(late),
        late[Cause.OTHER] / wait.late_s,
        parts.without_batch_s,
    )


def _rows(title: str, told: list[ToldChat], alone_s: list[float | None]) -> list[Row]:
    if not told:
        return [Row(f"{title}: late chats", 0.0, digits=0)]
    missing = 100.0 * max(one.missing for one in told)
    rows = [
        Row(f"{title}: late chats explained", float(len(told)), digits=0),
        Row(f"{title}: largest missing share", missing, unit="%", holds=missing <= 100.0 * LARGEST_MISSING),
    ]
    pairs = [(one.without_batch_s, real_s) for one, real_s in zip(told, alone_s, strict=True) if real_s is not None]
    if pairs:
        replayed, real = zip(*pairs, strict=True)
        case = f"{title}: median TTFT without batch work"
        rows.append(Row(case, 1e3 * median(replayed), 1e3 * median(real), "ms", 1))
    causes = sorted({one.cause for one in told}, key=list(Cause).index)
    rows += [
        Row(f"{title}: cause {cause}", float(sum(one.cause is cause for one in told)), unit="chats", digits=0)
        for cause in causes
    ]
    return rows

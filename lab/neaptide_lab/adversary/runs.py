"""One simulation of a case: what its clients saw, what offline work was done, and what failed."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from neaptide.engine.messages import AbortRequest, CancelBatch, ToEngine
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.simulation.measures import OnlineRecord
from neaptide.simulation.offline_feed import OFFLINE_PREFIX
from neaptide.simulation.replica import ONLINE_PREFIX, SimulatedReplica, SimulationError
from neaptide.simulation.simulator import offline_feed
from neaptide_lab.adversary.case import Case, Load, load_of

MAX_STEPS = 8000
"""A longer simulation is given up: it is too expensive for a search."""
WAITED_TTFTS, SLOWEST_TPOTS = 10.0, 2.0
"""Targets that a last chat may take to end before it counts as late without an end."""
INTEGRITY_STEPS = 500
"""Steps between two checks of the engine's state."""
QUANTUM_TOKENS = 8192
"""Tokens of one turn of a tenant."""


class TooLong(Exception):
    """The simulation takes too many steps."""


@dataclass(slots=True, frozen=True)
class Chat:
    """Times of one online request as its client saw them."""

    arrival_s: float
    began_s: float
    """When it was first scheduled; infinite if it never was."""
    ttft_ratio: float
    """TTFT over its target; infinite if it did not end."""
    tpot_ratio: float
    """Mean TPOT over its target; 0 without a second token, infinite if it did not end."""

    @property
    def ratio(self) -> float:
        """The worse of both. The request is in time if this is at most 1."""
        return max(self.ttft_ratio, self.tpot_ratio)

    @property
    def is_in_time(self) -> bool:
        return self.ratio <= 1.0 + 1e-9


@dataclass(slots=True, frozen=True)
class TenantShare:
    """Offline service of one tenant while all tenants had work."""

    delivered_tokens: int
    """Tokens that its rows reached."""
    admitted_tokens: int
    """Tokens of the rows that began, with their whole answers."""


@dataclass(slots=True, frozen=True)
class Outcome:
    chats: tuple[Chat, ...]
    """In the order of arrival, without the cancelled ones."""
    offline_tokens: int
    """Prompt and output tokens of offline work that were done for the first time within the duration."""
    tenants: dict[str, TenantShare]
    """Empty unless two tenants had work at the same time."""
    largest_row_tokens: int
    preemptions: int
    """Largest number of preemptions of one request."""
    computed_tokens: int
    again_tokens: int
    """Part of ``computed_tokens`` that was computed before."""
    hit_share: float
    """Fraction of the chats' prompt tokens that were found in the prefix cache."""
    longest_out_s: float
    """Longest time for which a preempted row was out while rows of its tenant began for the first time."""
    num_steps: int
    failure: str | None
    """Why the engine failed, if it did."""

    @property
    def attained(self) -> int:
        return sum(chat.is_in_time for chat in self.chats)


@dataclass(slots=True)
class _Watch(EngineObserver):
    """Records what a simulation does not measure, and checks the engine's state now and then."""

    load: Load
    began_s: dict[str, float] = field(default_factory=dict)
    preemptions: Counter[str] = field(default_factory=Counter)
    computed_tokens: int = 0
    longest_out_s: float = 0.0
    shares: dict[str, TenantShare] = field(default_factory=dict)
    largest_row_tokens: int = 0
    num_ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    _num_planned: int = 0
    _out_s: dict[str, float] = field(default_factory=dict)
    _last_began_s: dict[str, float] = field(default_factory=dict)
    _unbegun: Counter[str] = field(default_factory=Counter)
    _admitted: Counter[str] = field(default_factory=Counter)
    _ended: Counter[str] = field(default_factory=Counter)
    _row_tokens: dict[str, int] = field(default_factory=dict)
    _at_start: dict[str, TenantShare] | None = None
    _is_over: bool = False

    def __post_init__(self) -> None:
        for number, (one, tenant) in enumerate(zip(self.load.scenario.offline, self.load.tenant_of_job, strict=True)):
            self._unbegun[tenant] += len(one.requests)
            for row, request in enumerate(one.requests):
                tokens = request.input_tokens + request.output_tokens
                self._row_tokens[f"{OFFLINE_PREFIX}{number}:{row}"] = tokens
                self.largest_row_tokens = max(self.largest_row_tokens, tokens)
        self._start_s = max((one.submitted_s for one in self.load.scenario.offline), default=math.inf)
        self._end_s = min((cancel_s for cancel_s, _ in self.load.cancelled_jobs), default=math.inf)
        if len(self._unbegun) < 2:
            self._start_s = math.inf

    _start_s: float = field(init=False, default=math.inf)
    _end_s: float = field(init=False, default=math.inf)

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        plan, now_s = step.plan, draft.now_s
        self._watch_shares(now_s, scheduler)
        self.computed_tokens += int(plan.num_tokens.sum())
        for new in plan.new_requests:
            if new.request_id not in self.began_s:
                self._begin(new.request_id, now_s)
        for request_id in plan.preempted_ids:
            self.preemptions[request_id] += 1
            self._out_s[request_id] = now_s
        for request_id in plan.resumed_ids:
            self._back(request_id)
        self._num_planned += 1
        if self._num_planned % INTEGRITY_STEPS == 0:
            scheduler.queues.check_integrity()

    def ended(self, request: Request, reason: FinishReason) -> None:
        self.num_ends[request.request_id] += 1
        self._out_s.pop(request.request_id, None)
        if reason is FinishReason.ERROR:
            self.errors.append(request.request_id)
        if not request.is_online:
            self._ended[request.share] += request.num_prompt_tokens + request.num_output_tokens

    def finish(self, now_s: float, scheduler: Scheduler) -> None:
        """The simulation is over."""
        scheduler.queues.check_integrity()
        for request_id in list(self._out_s):
            self._back(request_id)
        if self._at_start is not None and not self._is_over:
            self._close_shares(scheduler)

    def _begin(self, request_id: str, now_s: float) -> None:
        self.began_s[request_id] = now_s
        if request_id.startswith(OFFLINE_PREFIX):
            tenant = self._tenant(request_id)
            self._unbegun[tenant] -= 1
            self._admitted[tenant] += self._row_tokens[request_id]
            self._last_began_s[tenant] = now_s

    def _back(self, request_id: str) -> None:
        """A preempted request runs again, or never will."""
        out_s = self._out_s.pop(request_id, None)
        if out_s is None or not request_id.startswith(OFFLINE_PREFIX):
            return
        passed_s = self._last_began_s.get(self._tenant(request_id), 0.0) - out_s
        self.longest_out_s = max(self.longest_out_s, passed_s)

    def _tenant(self, request_id: str) -> str:
        return self.load.tenant_of_job[int(request_id[len(OFFLINE_PREFIX) :].partition(":")[0])]

    def _watch_shares(self, now_s: float, scheduler: Scheduler) -> None:
        if self._is_over or now_s < self._start_s:
            return
        if self._at_start is None:
            self._at_start = self._served(scheduler)
        elif now_s >= self._end_s or min(self._unbegun.values()) == 0:
            self._close_shares(scheduler)

    def _close_shares(self, scheduler: Scheduler) -> None:
        assert self._at_start is not None
        self._is_over = True
        for tenant, now in self._served(scheduler).items():
            before = self._at_start[tenant]
            self.shares[tenant] = TenantShare(
                now.delivered_tokens - before.delivered_tokens, now.admitted_tokens - before.admitted_tokens
            )

    def _served(self, scheduler: Scheduler) -> dict[str, TenantShare]:
        delivered = Counter(self._ended)
        for request in scheduler.queues.running_offline.values():
            delivered[request.share] += request.num_computed_tokens
        return {tenant: TenantShare(delivered[tenant], self._admitted[tenant]) for tenant in self._unbegun}


def simulate_case(case: Case, policy: str, cap_tokens: int | None = None) -> Outcome:
    """Runs the case under the policy until its duration has passed and its chats have ended.

    Chats that still wait long after the duration count as late.

    Raises:
        TooLong: it takes more than ``MAX_STEPS`` steps.
        ValueError: no request fits into the memory.
    """
    load = load_of(case, policy, cap_tokens)
    with TemporaryDirectory(prefix="neaptide-adversary-") as directory:
        return _Simulation(case, load, Path(directory)).run()


class _Simulation:
    def __init__(self, case: Case, load: Load, directory: Path) -> None:
        self._case = case
        self._load = load
        self._online = load.scenario.online
        self._watch = _Watch(load)
        feed = offline_feed(load.scenario, directory)
        self._replica = SimulatedReplica(load.scenario, feed, [self._watch])
        longest_tokens = max((request.output_tokens for request in self._online), default=0)
        slowest_s = WAITED_TTFTS * case.ttft_s + SLOWEST_TPOTS * case.tpot_s * longest_tokens
        self._drained_s = case.duration_s + max(case.duration_s, slowest_s)

    def run(self) -> Outcome:
        failure = None
        try:
            self._loop()
            self._watch.finish(self._replica.now_s, self._replica.core.scheduler)
        except TooLong:
            raise
        except SimulationError as error:
            failure = f"no progress: {error}"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        return self._outcome(failure or self._fault())

    def _loop(self) -> None:
        replica, messages, sent = self._replica, self._messages(), 0
        message_s, message = next(messages)
        while True:
            while sent < len(self._online) and self._online[sent].arrival_s <= replica.now_s:
                replica.send(f"{ONLINE_PREFIX}{sent}", self._online[sent])
                sent += 1
            while message is not None and message_s <= replica.now_s and self._is_known(message):
                replica.core.handle(message)
                message_s, message = next(messages)
            is_past = replica.now_s >= self._case.duration_s and sent == len(self._online)
            if is_past and (not replica.has_online or replica.now_s > self._drained_s):
                return
            arrival_s = self._online[sent].arrival_s if sent < len(self._online) else math.inf
            if not replica.turn(min(arrival_s, message_s)):
                return
            if replica.measures.num_steps > MAX_STEPS:
                raise TooLong

    def _is_known(self, message: ToEngine) -> bool:
        """Whether the engine has what the message cancels. It may have come during the last step."""
        return not isinstance(message, AbortRequest) or message.request_ids[0] in self._replica.measures.online

    def _messages(self) -> Iterator[tuple[float, ToEngine | None]]:
        """Cancels, by time; then nothing, for ever."""
        cancels: list[tuple[float, int, ToEngine]] = [
            (cancel_s, index, AbortRequest([f"{ONLINE_PREFIX}{index}"])) for cancel_s, index in self._load.cancels
        ]
        cancels += [
            (cancel_s, number, CancelBatch(f"{OFFLINE_PREFIX}{number}"))
            for cancel_s, number in self._load.cancelled_jobs
        ]
        for cancel_s, _, message in sorted(cancels, key=lambda cancel: cancel[:2]):
            yield cancel_s, message
        while True:
            yield math.inf, None

    def _fault(self) -> str | None:
        """A fault that raised nothing."""
        watch = self._watch
        if watch.errors:
            return f"{len(watch.errors)} requests failed, {watch.errors[0]} first"
        twice = [request_id for request_id, ends in watch.num_ends.items() if ends > 1]
        return f"{twice[0]} ended twice" if twice else None

    def _outcome(self, failure: str | None) -> Outcome:
        watch, measures, case = self._watch, self._replica.measures, self._case
        cancelled = {index for _, index in self._load.cancels}
        chats = tuple(
            self._chat(index, measures.online.get(f"{ONLINE_PREFIX}{index}"))
            for index in range(len(self._online))
            if index not in cancelled
        )
        steps, all_steps = (measures.steps((-math.inf, end_s)) for end_s in (case.duration_s, math.inf))
        cached, admitted = (all_steps[f"online_{name}_tokens"].sum() for name in ("cached", "admitted"))
        return Outcome(
            chats=chats,
            offline_tokens=int(steps["prompt_tokens"].sum() + steps["output_tokens"].sum()),
            tenants=watch.shares,
            largest_row_tokens=watch.largest_row_tokens,
            preemptions=max(watch.preemptions.values(), default=0),
            computed_tokens=watch.computed_tokens,
            again_tokens=int(all_steps["again_tokens"].sum()),
            hit_share=float(cached / admitted) if admitted else 0.0,
            longest_out_s=watch.longest_out_s,
            num_steps=measures.num_steps,
            failure=failure,
        )

    def _chat(self, index: int, record: OnlineRecord | None) -> Chat:
        case = self._case
        began_s = self._watch.began_s.get(f"{ONLINE_PREFIX}{index}", math.inf)
        arrival_s = self._online[index].arrival_s
        if record is None or not record.is_done:
            return Chat(arrival_s, began_s, math.inf, math.inf)
        tpot_ratio = 0.0 if record.tpot_s is None else record.tpot_s / case.tpot_s
        return Chat(arrival_s, began_s, (record.first_s - arrival_s) / case.ttft_s, tpot_ratio)

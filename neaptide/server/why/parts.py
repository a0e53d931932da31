"""Splits the time that a chat waited into named parts, from the steps that the engine ran meanwhile.

Pure: no clock, no torch, no server. The method has two stages.

1. The steps are replayed without their batch work, in one pass since the engine last had no online work. Online work
   takes the share of the step's measured time that the cost model gives to it. Until batch work is left out, steps are
   the real ones. Then they are planned anew: each begins when the one before it has ended, with the prompts that
   have come by then. So prompts that came while batch work made a step long do not share one. Streams go on meanwhile,
   a token in every step. The difference to the real time is the part of batch work. The order of the prompts is the
   real one.
2. The replayed time is split by what each step held.

A target is used up first by what every request needs: its own prompt, the streams, the server's and the engine's own
time. What exceeds the target is the lateness.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from neaptide.engine.messages import HeldStep

LEAST_BATCH_SHARE = 1e-6
"""Share of a step's predicted time from which on it counts as batch work, not as rounding."""


class Cause(StrEnum):
    """A part of the time that a chat waits, in the order in which parts count as lateness."""

    OTHER = "other"
    """Not recorded."""
    BATCH = "batch_work"
    """Difference to the replay without batch work."""
    ENGINE_GONE = "engine_gone"
    AGAIN = "preempted"
    """Waiting after a preemption, and computing again what it dropped."""
    MEMORY = "memory"
    """Waiting for KV memory that other chats hold."""
    SLOTS = "slots"
    """Waiting for one of the slots (``max_num_seqs``)."""
    MASKS = "grammar_masks"
    SLOW = "slow_steps"
    """Time of steps beyond their prediction and its margin."""
    PROMPTS = "other_prompts"
    """Prompts of other chats, before its own or in the same steps."""
    BEFORE = "before_engine"
    """Reading, tokenization and checks in the API process."""
    AFTER = "after_engine"
    """From the engine's token to the client's connection."""
    BETWEEN = "between_steps"
    """The engine between its steps: planning, messages, commits."""
    STREAMS = "streams"
    """Tokens of running streams."""
    OWN = "own_prompt"


@dataclass(slots=True, frozen=True, kw_only=True)
class TokenWait:
    """The wait of one choice for a token, in seconds on ``CLOCK_MONOTONIC``."""

    request_id: str
    """Id in the engine."""
    start_s: float
    """Arrival of the request, or delivery of the token before."""
    end_s: float
    """Delivery of the token."""
    target_s: float
    new_prompt_tokens: int
    """Prompt tokens that were not in the prefix cache."""
    sent_s: float
    """When the request was sent to the engine."""
    first_token_s: float | None
    """When the engine had the first token; None: the wait is for a later token."""
    engine_gone: tuple[tuple[float, float], ...] = ()
    """Times without an engine: from and until."""

    @property
    def late_s(self) -> float:
        return max(self.end_s - self.start_s - self.target_s, 0.0)


@dataclass(slots=True, frozen=True)
class StepsAround:
    """The recorded steps around a wait, of one engine, in order."""

    steps: Sequence[HeldStep]
    taken_s: Mapping[str, float]
    """When the engine took in each online request."""
    ids: Mapping[int, str]
    """Request ids by admission number."""
    block_size: int
    since_s: float
    """Start of the record. Earlier steps are not known."""


@dataclass(slots=True)
class WaitParts:
    """The parts of a wait; they add up to it."""

    seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    num_prompts: int = 0
    """Other chats whose prompts were computed meanwhile."""
    num_streams: int = 0
    """Most streams that one of its steps held."""
    steps: list[HeldStep] = field(default_factory=list)
    """The steps between start and end."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def without_batch_s(self) -> float:
        """How long the wait would have been without batch work."""
        return self.total_s - self.seconds[Cause.BATCH]

    def lateness(self, late_s: float) -> dict[Cause, float]:
        """Splits the lateness: parts count in the order of ``Cause`` until they make it up."""
        found: dict[Cause, float] = {}
        left_s = late_s
        for cause in Cause:
            found[cause] = min(self.seconds[cause], left_s)
            left_s = max(left_s - found[cause], 0.0)
        found[Cause.OTHER] += left_s
        return found


def parts_of(wait: TokenWait, around: StepsAround) -> WaitParts:
    """The parts of a wait for a first token or for a later one."""
    return _FirstToken(wait, around).parts() if wait.first_token_s is not None else _gap_parts(wait, around)


class _Prompt(NamedTuple):
    """A recorded chunk of a prompt, with its time in the replay."""

    number: int
    """Admission number."""
    come_s: float
    """When its request was there."""
    seconds: dict[Cause, float]


class _Replay:
    """Replays steps without their batch work, and splits the time after ``floor_s`` by cause."""

    def __init__(self, wait: TokenWait, around: StepsAround, floor_s: float) -> None:
        self.found = WaitParts()
        self._has_batch_work = False
        """Whether the replay has left out any batch work."""
        self._wait = wait
        self._around = around
        self._floor_s = floor_s
        self._clock_s = self._last_end_s = floor_s
        self._own = {number for number, request_id in around.ids.items() if request_id == wait.request_id}
        self._is_admitted = self._is_preempted = False
        self._reached_tokens = self._own_end = 0
        """Tokens that its KV had before a preemption, and that it has now."""
        self._prompts: set[int] = set()
        self._left: list[_Prompt] = []
        """Chunks that came too late for the steps so far."""

    def begin(self, clock_s: float) -> None:
        """Starts the replay before ``floor_s``, at the beginning of online work."""
        self._clock_s = self._last_end_s = clock_s

    def has_tokens(self) -> None:
        """Notes that the request ran before the first of the steps; whatever prompt it computes now is lost work."""
        self._is_admitted, self._reached_tokens = True, sys.maxsize

    def is_own(self, step: HeldStep) -> bool:
        """Whether the step computed tokens of the request."""
        if any(number in self._own for number, _, _ in step.chunks):
            return True
        return bool(self._own) and bool(np.isin(_numbers(step), list(self._own)).any())

    def run(self, step: HeldStep) -> None:
        """Replays the online work of the next step, in one step or in several."""
        self._note_state(step)
        is_own = any(number in self._own for number, _, _ in step.chunks)
        come_s = {number: self._come_s(number, is_own=is_own) for number, _, _ in step.chunks}
        come_before_s = max((one for one in come_s.values() if one <= self._floor_s), default=-math.inf)
        planned_s = max(self._last_end_s, come_before_s)
        between_s = max(step.end_s - step.busy_s - planned_s, 0.0)
        # A step of several requests ends when the device has done it, and the next may be planned before that.
        busy_s = min(step.busy_s, max(step.end_s - planned_s, 0.0))
        self._last_end_s = max(step.end_s, self._last_end_s)
        if step.end_s > self._floor_s:
            self.found.steps.append(step)
        common, by_prompt = self._pieces(step, busy_s)
        if not common and not by_prompt:
            return
        left = self._left + [_Prompt(number, come_s[number], pieces) for number, pieces in by_prompt]
        streams_s, num_streams = common.get(Cause.STREAMS, 0.0), len(_numbers(step))
        common[Cause.BETWEEN] = common.get(Cause.BETWEEN, 0.0) + between_s
        if not self._has_batch_work:
            # Nothing was left out so far: the step is the real one, with all its prompts.
            self._run_one(planned_s, _sum([common, *(pieces for _, pieces in by_prompt)]), [*come_s], num_streams)
            return
        while True:
            start_s = self._next_start_s(min((one.come_s for one in left), default=-math.inf), streams_s, num_streams)
            taken = [one for one in left if one.come_s <= start_s]
            left = [one for one in left if one.come_s > start_s]
            pieces = _sum([common, *(one.seconds for one in taken)])
            self._run_one(start_s, pieces, [one.number for one in taken], num_streams)
            if not left or any(one.number in self._own for one in taken):
                break
            common = {Cause.STREAMS: streams_s}
        self._left = left

    def _next_start_s(self, come_s: float, streams_s: float, num_streams: int) -> float:
        """Start of the next step, in which a prompt that comes at ``come_s`` takes part.

        Streams do not wait for prompts: until then they have steps of their own.
        """
        if come_s <= self._clock_s:
            return self._clock_s
        if streams_s <= 0:
            return come_s
        start_s = self._clock_s + math.ceil((come_s - self._clock_s) / streams_s) * streams_s
        if start_s > self._floor_s:
            self.found.seconds[Cause.STREAMS] += start_s - max(self._floor_s, self._clock_s)
            self.found.num_streams = max(self.found.num_streams, num_streams)
        return start_s

    def _run_one(self, start_s: float, pieces: dict[Cause, float], prompts: list[int], num_streams: int) -> None:
        length_s = sum(pieces.values())
        self._clock_s = start_s + length_s
        counted_s = self._clock_s - max(start_s, self._floor_s)
        if counted_s <= 0 or length_s <= 0:
            return
        for cause, seconds in pieces.items():
            self.found.seconds[cause] += seconds * min(counted_s / length_s, 1.0)
        self._prompts.update(number for number in prompts if number not in self._own)
        self.found.num_prompts = len(self._prompts)
        self.found.num_streams = max(self.found.num_streams, num_streams)

    def _note_state(self, step: HeldStep) -> None:
        if self._wait.request_id in step.preempted:
            self._is_admitted, self._is_preempted = False, True
            self._reached_tokens = max(self._reached_tokens, self._own_end)
        if any(request_id == self._wait.request_id for _, request_id in step.admitted):
            self._is_admitted, self._is_preempted = True, False
        for number, num_tokens, context in step.chunks:
            if number in self._own:
                self._own_end = context + num_tokens

    def _come_s(self, number: int, *, is_own: bool) -> float:
        """When the request of a chunk was there.

        Args:
            is_own: whether the request has a chunk in the same step. If not, what came later and runs before it was
                put before it, and counts as there.
        """
        if number in self._own:
            return self._floor_s
        taken_s = self._around.taken_s.get(self._around.ids.get(number, ""), -math.inf)
        return taken_s if is_own or taken_s <= self._floor_s else -math.inf

    def _pieces(self, step: HeldStep, busy_s: float) -> tuple[dict[Cause, float], list[tuple[int, dict[Cause, float]]]]:
        """The step's time without batch work, by cause: what it takes whatever prompts it has, and that of each chunk.

        Nothing if it held no online work or the request waited for memory of batch work.
        """
        share = min(step.online_s / step.predicted_s, 1.0) if step.predicted_s > 0 else float(bool(_has_online(step)))
        online_s = busy_s * share
        waits_for = self._waits_for(step)
        self._has_batch_work |= share < 1.0 - LEAST_BATCH_SHARE or waits_for is Cause.BATCH
        if online_s <= 0 or not _has_online(step) or waits_for is Cause.BATCH:
            return {}, []
        masks_s = min(step.mask_s, online_s)
        expected_s = (step.predicted_s + step.margin_s) * share if step.predicted_s > 0 else online_s
        slow_s = max(online_s - masks_s - expected_s, 0.0)
        rest_s = online_s - masks_s - slow_s
        common = {Cause.MASKS: masks_s, Cause.SLOW: slow_s}
        if waits_for is not None:
            return common | {waits_for: rest_s}, []
        if not step.chunks:
            return common | {Cause.STREAMS: rest_s}, []
        streams_s = rest_s * min(step.streams_s / step.online_s, 1.0) if step.online_s > 0 else 0.0
        common[Cause.STREAMS] = streams_s
        token_s = (rest_s - streams_s) / sum(num_tokens for _, num_tokens, _ in step.chunks)
        return common, [(chunk[0], self._chunk_pieces(*chunk, token_s)) for chunk in step.chunks]

    def _chunk_pieces(self, number: int, num_tokens: int, context: int, token_s: float) -> dict[Cause, float]:
        if number not in self._own:
            return {Cause.PROMPTS: num_tokens * token_s}
        repeated = min(max(self._reached_tokens - context, 0), num_tokens)
        return {Cause.OWN: (num_tokens - repeated) * token_s, Cause.AGAIN: repeated * token_s}

    def _waits_for(self, step: HeldStep) -> Cause | None:
        """Cause that kept the request out of the step; None if only time did."""
        if self._is_admitted or step.end_s <= self._floor_s or not step.waiting_online:
            return None
        if self._is_preempted:
            return Cause.AGAIN
        if step.free_slots <= 0:
            return Cause.SLOTS
        needed = -(-self._wait.new_prompt_tokens // self._around.block_size)
        if needed <= step.available_blocks:
            return None
        return Cause.MEMORY if needed > step.available_blocks + step.offline_blocks else Cause.BATCH


class _FirstToken:
    """Splits the wait from arrival to the first token."""

    def __init__(self, wait: TokenWait, around: StepsAround) -> None:
        self._wait = wait
        self._around = around

    def parts(self) -> WaitParts:
        wait, around = self._wait, self._around
        assert wait.first_token_s is not None
        sent_s, done_s = min(max(wait.sent_s, wait.start_s), wait.end_s), min(wait.first_token_s, wait.end_s)
        again_s = max((until_s for _, until_s in wait.engine_gone if sent_s < until_s <= done_s), default=sent_s)
        done_s = max(done_s, again_s)
        start_s = max(again_s, min(around.since_s, done_s))
        replay = _Replay(wait, around, start_s)
        first = self._first_step(start_s)
        steps = [step for step in around.steps[first:] if step.end_s <= done_s + 1e-6]
        if steps:
            replay.begin(min(steps[0].end_s - steps[0].busy_s, start_s))
        for step in steps:
            replay.run(step)
        recorded_s = min(max(steps[-1].end_s, start_s), done_s) if steps else start_s
        seconds = replay.found.seconds
        _fit(seconds, recorded_s - start_s)
        seconds[Cause.OTHER] += done_s - recorded_s
        seconds[Cause.BEFORE] += sent_s - wait.start_s
        seconds[Cause.ENGINE_GONE] += again_s - sent_s
        seconds[Cause.OTHER] += start_s - again_s
        seconds[Cause.AFTER] += max(wait.end_s - max(done_s, sent_s), 0.0)
        return replay.found

    def _first_step(self, start_s: float) -> int:
        """The step at which online work began that was not done when the request was sent."""
        steps = self._around.steps
        first = next((index for index, step in enumerate(steps) if step.end_s > start_s), len(steps))
        while first > 0 and _has_online(steps[first - 1]):
            first -= 1
        return first


def _gap_parts(wait: TokenWait, around: StepsAround) -> WaitParts:
    """The parts of a gap between two tokens."""
    own = _Replay(wait, around, wait.start_s)
    ends = [index for index, step in enumerate(around.steps) if step.end_s <= wait.end_s and own.is_own(step)]
    before = [index for index in ends if around.steps[index].end_s <= wait.start_s]
    if not before:
        own.found.seconds[Cause.OTHER] = wait.end_s - wait.start_s
        return own.found
    start_s = around.steps[before[-1]].end_s
    replay = _Replay(wait, around, start_s)
    replay.has_tokens()
    for step in around.steps[before[-1] + 1 : ends[-1] + 1]:
        replay.run(step)
    seconds = replay.found.seconds
    engine_s = around.steps[ends[-1]].end_s - start_s
    _fit(seconds, engine_s)
    seconds[Cause.AFTER] += max(wait.end_s - wait.start_s - engine_s, 0.0)
    return replay.found


def _fit(seconds: dict[Cause, float], real_s: float) -> None:
    """Gives to batch work what the replay without it saved. Rounding aside, the replay never takes longer."""
    replayed_s = sum(seconds.values())
    if replayed_s > real_s > 0:
        for cause in seconds:
            seconds[cause] *= real_s / replayed_s
    seconds[Cause.BATCH] += max(real_s - replayed_s, 0.0)


def _sum(parts: Sequence[Mapping[Cause, float]]) -> dict[Cause, float]:
    """Seconds of several parts together, by cause."""
    found: dict[Cause, float] = {}
    for part in parts:
        for cause, seconds in part.items():
            found[cause] = found.get(cause, 0.0) + seconds
    return found


def _numbers(step: HeldStep) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.frombuffer(step.streams, np.int32)


def _has_online(step: HeldStep) -> bool:
    return bool(step.streams or step.chunks)

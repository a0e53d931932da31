"""Sums of the device's time by use, in buckets of ten seconds over the last day, and when batch lines started."""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from neaptide.engine.messages import EngineReady, RecentSteps, RequestOutput
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.events import BatchOutputs, EngineLost

Seconds = defaultdict[str, float]
"""Seconds by use; batch and flex work by share, with the prefix ``key:``."""
BUCKET_S = 10
LEAST_WIDTH_S = 0.125
KEPT_S = 25 * 3600
"""The longest completion window, and an hour."""
MAX_KEYS = 8
"""Most keys of one sum; the others are added up."""
MAX_LINES = 20_000
"""Most lines whose start is kept."""
MEMORY_LIMIT = "KV blocks"
"""``scheduler.draft.Limit.MEMORY``: the step had no memory for more batch work."""
OWN_KEY, OTHERS = "own_key", "other_keys"
"""Uses of ``parts`` for batch and flex work."""
OTHER_KEYS = "*"
"""Share under which the keys beyond ``MAX_KEYS`` are added up."""


class DeviceUse(StrEnum):
    """A use of the device's time other than batch work."""

    CHATS = "chats"
    MEMORY = "memory"
    """Chats, while their KV memory left none for batch work."""
    PAUSED = "paused"
    """No batch work, because the operator has paused it."""
    ENGINE_GONE = "engine_gone"
    BETWEEN = "between_steps"
    """The engine between its steps, and without work."""
    NOT_RECORDED = "not_recorded"
    """Before the server's start."""


class UsedTime(NamedTuple):
    """Seconds of a time, by use."""

    uses: dict[DeviceUse, float]
    keys: dict[str, float]
    """Batch and flex work by share."""


class DeviceTimeSums:
    """Sums up the device's time. Event loop only.

    Args:
        wall: unix time in seconds.
    """

    def __init__(self, client: EngineClient, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._since_s = wall()
        self._buckets: deque[tuple[int, Seconds]] = deque()
        """Start of each bucket, and its sums."""
        self._gone: deque[tuple[float, float]] = deque()
        """Times without an engine: from and until; the last may be open."""
        client.subscribe(RecentSteps, self._on_steps)
        client.subscribe(EngineLost, self._on_lost)
        client.subscribe(EngineReady, self._on_ready)

    def _on_lost(self, _: EngineLost) -> None:
        if not self._gone or self._gone[-1][1] < math.inf:
            self._gone.append((self._wall(), math.inf))

    def _on_ready(self, _: EngineReady) -> None:
        if self._gone and self._gone[-1][1] == math.inf:
            self._gone.append((self._gone.pop()[0], self._wall()))

    def _on_steps(self, report: RecentSteps) -> None:
        sums = self._now()
        memory_s = sum(
            step.busy_s * min(step.online_s / step.predicted_s, 1.0)
            for step in report.steps
            if step.offline_limit == MEMORY_LIMIT and step.online_blocks >= step.offline_blocks and step.predicted_s > 0
        )
        memory_s = min(memory_s, report.online_s)
        sums[DeviceUse.MEMORY] += memory_s
        sums[DeviceUse.CHATS] += report.online_s - memory_s
        for share, seconds in report.offline_s.items():
            sums[f"key:{share}"] += seconds
        if report.is_paused:
            sums[DeviceUse.PAUSED] += report.span_s - report.online_s - sum(report.offline_s.values())
        keys = sorted((name for name in sums if name.startswith("key:")), key=lambda name: -sums[name])
        for name in keys[MAX_KEYS:]:
            sums[f"key:{OTHER_KEYS}"] += sums.pop(name)

    def _now(self) -> Seconds:
        start_s = int(self._wall()) // BUCKET_S * BUCKET_S
        if not self._buckets or self._buckets[-1][0] < start_s:
            self._buckets.append((start_s, defaultdict(float)))
            while self._buckets[0][0] < start_s - KEPT_S:
                self._since_s = max(self._since_s, self._buckets.popleft()[0] + BUCKET_S)
            while self._gone and self._gone[0][1] <= self._since_s:
                self._gone.popleft()
        return self._buckets[-1][1]

    def between(self, start_s: float, end_s: float) -> UsedTime:
        """Uses of the time between two moments (unix seconds). They add up to it.

        A bucket that is in it in part counts in proportion.
        """
        recorded_s = min(max(start_s, self._since_s), end_s)
        found: Seconds = defaultdict(float)
        now_s = self._wall()
        for first_s, sums in self._buckets:
            # The last bucket has the time until now only.
            width_s = min(max(now_s - first_s, LEAST_WIDTH_S), BUCKET_S)
            part = (min(end_s, first_s + width_s) - max(recorded_s, first_s)) / width_s
            if part > 0:
                for name, seconds in sums.items():
                    found[name] += seconds * min(part, 1.0)
        gone_s = sum(max(min(until_s, end_s) - max(from_s, recorded_s), 0.0) for from_s, until_s in self._gone)
        found[DeviceUse.ENGINE_GONE] = gone_s
        told_s, whole_s = sum(found.values()), end_s - recorded_s
        if told_s > whole_s > 0:  # A report of the bucket before, or of a step that took longer than a bucket.
            for name in found:
                found[name] *= whole_s / told_s
        found[DeviceUse.BETWEEN] = max(whole_s - told_s, 0.0)
        found[DeviceUse.NOT_RECORDED] = recorded_s - start_s
        keys = {name.removeprefix("key:"): seconds for name, seconds in found.items() if name.startswith("key:")}
        return UsedTime({use: found[use] for use in DeviceUse}, keys)

    def parts(self, start_s: float, end_s: float, share: str) -> dict[str, float]:
        """Seconds between two moments for the batches of a share, by use. They add up to the time."""
        used = self.between(start_s, end_s)
        own_s = used.keys.get(share, 0.0)
        parts = {use.value: seconds for use, seconds in used.uses.items() if seconds}
        return parts | {OWN_KEY: own_s, OTHERS: sum(used.keys.values()) - own_s}


class LineStarts:
    """When the last batch lines that have ended were first scheduled. Event loop only."""

    def __init__(self, client: EngineClient, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._started_s: dict[str, float] = {}
        client.subscribe(BatchOutputs, self._on_outputs)

    def _on_outputs(self, event: BatchOutputs) -> None:
        for output in event.outputs:
            if isinstance(output, RequestOutput) and output.finish_reason is not None and output.scheduled_s > 0:
                self._started_s[output.request_id] = self._wall() - (self._clock() - output.scheduled_s)
                if len(self._started_s) > MAX_LINES:
                    del self._started_s[next(iter(self._started_s))]

    def started_s(self, row: str) -> float | None:
        """Unix time at which the line was first scheduled; None if that is not known."""
        return self._started_s.get(row)

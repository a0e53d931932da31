"""History of the last 15 minutes: sums over intervals of five seconds, for the dashboard and the log.

Memory is bounded: 180 intervals, each with counts and two histograms of at most ``NUM_BUCKETS`` buckets. Intervals of
several servers add up, so a gateway can merge theirs.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from neaptide.engine.messages import Occupancy, StepStats
from neaptide.server.observe.judgement import JudgedChoice

INTERVAL_S = 5
KEPT_S = 900
FIRST_BUCKET_S = 0.001
BUCKET_RATIO = 1.02
"""Upper limit of a latency bucket over that of the one before; a quantile is at most 2% too high."""
NUM_BUCKETS = 717
"""The last one begins at 24 minutes."""


class Targets(msgspec.Struct):
    """Choices of online requests that met or missed their targets."""

    ttft_met: int = 0
    ttft_missed: int = 0
    tpot_met: int = 0
    tpot_missed: int = 0
    missed: int = 0
    """Those that missed either target."""

    def add(self, other: "Targets") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Interval(msgspec.Struct, kw_only=True):
    """What happened in ``INTERVAL_S`` seconds. All fields but the first two add up."""

    start_s: int
    """Unix time, a multiple of ``INTERVAL_S``."""
    occupancy: tuple[int, ...] = ()
    """Last values of ``Occupancy``'s fields, in order; empty if none was reported."""
    ttft: dict[int, int] = {}
    """Number of online choices by latency bucket, as in ``bucket_of``."""
    tpot: dict[int, int] = {}
    targets: dict[str, Targets] = {}
    """By tier."""
    outcomes: dict[str, int] = {}
    """Number of ended requests by ``RequestRecord.outcome``."""
    errors: dict[str, int] = {}
    """Number of server errors and refusals by error code."""
    ended: dict[str, int] = {}
    """Number of ended requests by tier."""
    online_tokens: int = 0
    offline_tokens: int = 0
    steps: int = 0
    """Number of steps whose time was predicted."""
    step_s: float = 0.0
    predicted_s: float = 0.0
    steps_within_margin: int = 0
    error_ratio: float = 0.0
    """Sum of the steps' relative prediction errors."""
    preemptions: int = 0

    def add(self, other: "Interval") -> None:
        """Adds another server's interval of the same time."""
        pairs = zip(self.occupancy, other.occupancy, strict=False)
        self.occupancy = tuple(a + b for a, b in pairs) or self.occupancy or other.occupancy
        for name in ("ttft", "tpot", "outcomes", "errors", "ended"):
            setattr(self, name, dict(Counter(getattr(self, name)) + Counter(getattr(other, name))))
        for tier, targets in other.targets.items():
            self.targets.setdefault(tier, Targets()).add(targets)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_SUMS = (
    "online_tokens",
    "offline_tokens",
    "steps",
    "step_s",
    "predicted_s",
    "steps_within_margin",
    "error_ratio",
    "preemptions",
)


class Absence(msgspec.Struct):
    """A time without an engine, in unix time."""

    start_s: float
    end_s: float | None = None
    """None while it lasts."""


class LateChat(msgspec.Struct, kw_only=True, frozen=True):
    """A choice that missed a target. No field has text of its caller."""

    at_s: float
    """Unix time of its end."""
    request: str
    """The request's name in the log (``engine_id``), which is also the end of the reply's id."""
    tier: str
    ttft_s: float | None
    ttft_slo_s: float
    tpot_s: float | None
    tpot_slo_s: float
    why: str = ""
    """A sentence that says why; empty while it is not known."""


def bucket_of(seconds: float) -> int:
    """Number of the latency bucket that holds ``seconds``."""
    if seconds <= FIRST_BUCKET_S:
        return 0
    return min(math.ceil(math.log(seconds / FIRST_BUCKET_S, BUCKET_RATIO) - 1e-9), NUM_BUCKETS - 1)


def quantile(buckets: dict[int, int], share: float) -> float | None:
    """Upper limit, in seconds, of the bucket that holds this quantile; None without a value."""
    rank, seen = math.ceil(share * sum(buckets.values()) - 1e-9), 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= rank:
            return FIRST_BUCKET_S * BUCKET_RATIO**bucket
    return None


class History:
    """Records a server's events. Event loop only.

    Args:
        wall: unix time in seconds.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._intervals: deque[Interval] = deque()
        self._absences: deque[Absence] = deque()

    @property
    def now_s(self) -> float:
        return self._wall()

    @property
    def whole_until_s(self) -> float:
        """End of the last interval that is over."""
        return int(self._wall()) // INTERVAL_S * INTERVAL_S

    @property
    def intervals(self) -> list[Interval]:
        """The intervals of the last 15 minutes in which something was reported, oldest first."""
        self._forget()
        return list(self._intervals)

    @property
    def absences(self) -> list[Absence]:
        """The times without an engine that touch the last 15 minutes, oldest first."""
        self._forget()
        return list(self._absences)

    def on_engine_lost(self, _: object) -> None:
        """Notes that there is no engine from now on. The replacement may end before it is ready."""
        if not self._absences or self._absences[-1].end_s is not None:
            self._absences.append(Absence(self._wall()))

    def on_engine_ready(self, _: object) -> None:
        if self._absences and self._absences[-1].end_s is None:
            self._absences[-1].end_s = self._wall()

    def on_choice(self, tier: str, choice: JudgedChoice) -> None:
        """Notes the end of one choice of an online request."""
        now = self._now()
        targets = now.targets.setdefault(tier, Targets())
        if choice.ttft_s is not None:
            _count(now.ttft, bucket_of(choice.ttft_s))
        if choice.tpot_s is not None:
            _count(now.tpot, bucket_of(choice.tpot_s))
        ttft_met, tpot_met = choice.ttft_met, choice.tpot_met
        targets.add(Targets(ttft_met, not ttft_met, tpot_met, not tpot_met, not (ttft_met and tpot_met)))

    def on_ended(self, tier: str, outcome: str, error_code: str | None) -> None:
        """Notes the end of a request, well or not."""
        now = self._now()
        _count(now.outcomes, outcome)
        _count(now.ended, tier)
        if outcome in ("server_error", "shed"):
            _count(now.errors, error_code or "unknown")

    def on_step(self, stats: StepStats) -> None:
        now = self._now()
        now.online_tokens += stats.online_prefill_tokens + stats.online_decode_tokens
        now.offline_tokens += stats.offline_prefill_tokens + stats.offline_decode_tokens
        now.preemptions += stats.preempted_online + stats.preempted_offline
        if stats.duration_s > 0 and stats.predicted_s > 0 and not stats.is_aborted:
            now.steps += 1
            now.step_s += stats.duration_s
            now.predicted_s += stats.predicted_s
            now.steps_within_margin += stats.duration_s <= stats.predicted_s + stats.margin_s
            now.error_ratio += abs(stats.predicted_s - stats.duration_s) / stats.duration_s
        self.on_occupancy(stats)

    def on_occupancy(self, occupancy: Occupancy | StepStats) -> None:
        self._now().occupancy = tuple(getattr(occupancy, name) for name in Occupancy.__struct_fields__)

    def _now(self) -> Interval:
        start_s = int(self._wall()) // INTERVAL_S * INTERVAL_S
        if not self._intervals or self._intervals[-1].start_s != start_s:
            if self._intervals and self._intervals[-1].start_s > start_s:
                return self._intervals[-1]  # The wall clock was set back.
            self._intervals.append(Interval(start_s=start_s))
            self._forget()
        return self._intervals[-1]

    def _forget(self) -> None:
        oldest_s = self._wall() - KEPT_S - INTERVAL_S
        while self._intervals and self._intervals[0].start_s <= oldest_s:
            self._intervals.popleft()
        while self._absences and (end_s := self._absences[0].end_s) is not None and end_s <= oldest_s:
            self._absences.popleft()


def _count(counts: dict[int, int] | dict[str, int], key: int | str) -> None:
    counts[key] = counts.get(key, 0) + 1  # type: ignore[index, arg-type]


def total(intervals: Iterable[Interval]) -> Interval:
    """The sum of intervals, with the last occupancy."""
    found = Interval(start_s=0)
    for one in intervals:
        found.add(one)
        found.occupancy = one.occupancy or found.occupancy
    return found


def since(intervals: Sequence[Interval], start_s: float) -> list[Interval]:
    """The intervals that began at ``start_s`` or later."""
    return [one for one in intervals if one.start_s >= start_s]


def merged(histories: Iterable[Sequence[Interval]]) -> list[Interval]:
    """Intervals of several servers as one history, oldest first."""
    found: dict[int, Interval] = {}
    for history in histories:
        for one in history:
            found.setdefault(one.start_s, Interval(start_s=one.start_s)).add(one)
    return [found[start_s] for start_s in sorted(found)]

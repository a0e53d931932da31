"""Ten-minute aggregates of the traffic, from which quotes learn the capacity that chats leave. Clock-free."""

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from neaptide.durations import DAY_S
from neaptide.engine.messages import StepStats

PERIOD_S = 600
KEPT_S = 14 * DAY_S
LENGTH_RATIO = 1.25
"""Upper limit of a length bucket over that of the one before; a quantile is at most 25% too high."""
NUM_LENGTHS = 80
"""Number of length buckets; the last one begins above 45 million tokens."""
MAX_KEYS = 16
"""Number of keys that are counted by name in a period; the rest count as ``OTHER``."""
OTHER = "other"
LONGEST_GAP_S = 5.0
"""Longest time between two ticks or steps that is taken to be observed."""


class Saturated(msgspec.Struct, kw_only=True):
    """The part of a period in which batch lines waited for the device. It shows what batch work gets beside chats."""

    seconds: float = 0.0
    steps: int = 0
    online_tokens: int = 0
    online_kv_tokens: int = 0
    """As in ``Period``."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    """Tokens of offline work."""
    row_steps: int = 0
    """Running offline requests, summed over steps."""
    kv_tokens: int = 0
    """Tokens of KV that offline work held, summed over steps."""

    def add(self, other: "Saturated") -> None:
        """Adds another part of the record."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Period(msgspec.Struct, kw_only=True):
    """Sums of the traffic of ``PERIOD_S`` seconds. All fields but the first add up."""

    start_s: int
    """Unix time, a multiple of ``PERIOD_S``."""
    seconds: float = 0.0
    """Observed time: an engine was up."""
    paused_s: float = 0.0
    """Part of it in which the operator paused offline work."""
    requests: dict[str, int] = {}
    """Number of ended requests by tier."""
    keys: dict[str, int] = {}
    """Number of ended requests by fingerprint of the key; empty without keys."""
    prompt_tokens: dict[int, int] = {}
    """Number of online requests by length bucket of the prompt."""
    answer_tokens: dict[int, int] = {}
    """Number of online requests by length bucket of the answer."""
    steps: int = 0
    step_s: float = 0.0
    """Busy time of the device."""
    online_tokens: int = 0
    """Tokens of online requests that steps computed."""
    online_kv_tokens: int = 0
    """Tokens of KV that online requests held, summed over the steps with an online decode, which reads them."""
    offline_tokens: int = 0
    free_blocks: int = 0
    """KV blocks that were free or only cached, summed over steps."""
    most_online_blocks: int = 0
    """Most KV blocks that online requests held after a step."""
    saturated: Saturated = msgspec.field(default_factory=Saturated)

    def add(self, other: "Period") -> None:
        """Adds another part of the same period."""
        for name in ("requests", "keys", "prompt_tokens", "answer_tokens"):
            setattr(self, name, dict(Counter(getattr(self, name)) + Counter(getattr(other, name))))
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_online_blocks = max(self.most_online_blocks, other.most_online_blocks)
        self.saturated.add(other.saturated)


_SUMS = (
    "seconds",
    "paused_s",
    "steps",
    "step_s",
    "online_tokens",
    "online_kv_tokens",
    "offline_tokens",
    "free_blocks",
)
period_encoder = msgspec.json.Encoder()
period_decoder = msgspec.json.Decoder(Period)


def length_bucket(num_tokens: int) -> int:
    """Number of the bucket that holds a length; 0 holds lengths of 0 and 1."""
    if num_tokens <= 1:
        return 0
    return min(math.ceil(math.log(num_tokens, LENGTH_RATIO) - 1e-9), NUM_LENGTHS - 1)


def length_quantile(buckets: dict[int, int], share: float) -> int | None:
    """Upper limit, in tokens, of the bucket that holds this quantile; None without a value."""
    rank, seen = math.ceil(share * sum(buckets.values()) - 1e-9), 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= rank:
            return round(LENGTH_RATIO**bucket)
    return None


def length_sums(buckets: Mapping[int, int]) -> tuple[int, float, float]:
    """Number of the lengths, their sum, and that of their squares; each length is taken as the middle of its bucket."""
    middles = {bucket: LENGTH_RATIO ** (bucket - 0.5) if bucket else 1.0 for bucket in buckets}
    total = sum(count * middles[bucket] for bucket, count in buckets.items())
    squares = sum(count * middles[bucket] ** 2 for bucket, count in buckets.items())
    return sum(buckets.values()), total, squares


class PeriodRecorder:
    """Collects the current period. Times are passed in: unix seconds for periods, the engine's for steps.

    Args:
        block_size: tokens of a KV block; set when the engine is ready.
    """

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self._current: Period | None = None
        self._ticked_s: float | None = None
        self._stepped_s: float | None = None
        """End of the last step, if offline work waited then."""

    def tick(self, now_s: float, *, is_up: bool, is_paused: bool) -> Period | None:
        """Notes that time has passed; call about once a second. Returns the period that has ended, if one has."""
        start_s = int(now_s) // PERIOD_S * PERIOD_S
        ended = None
        if self._current is None:
            self._current = Period(start_s=start_s)
        elif start_s > self._current.start_s:
            ended, self._current = self._current, Period(start_s=start_s)
        passed_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        self._ticked_s = now_s
        if is_up and 0.0 < passed_s <= LONGEST_GAP_S:
            self._current.seconds += passed_s
            self._current.paused_s += passed_s if is_paused else 0.0
        return ended

    def take(self) -> Period | None:
        """The unfinished period, which then begins again; for a server that stops. Both parts add up."""
        taken = self._current
        self._current = None if taken is None else Period(start_s=taken.start_s)
        return taken

    @property
    def current(self) -> Period | None:
        return self._current

    def on_step(self, stats: StepStats) -> None:
        now = self._current
        if now is None:
            return
        online = stats.online_prefill_tokens + stats.online_decode_tokens
        kv_tokens = stats.blocks_online * self.block_size if stats.online_decode_tokens else 0
        now.steps += 1
        now.step_s += stats.duration_s
        now.online_tokens += online
        now.online_kv_tokens += kv_tokens
        now.offline_tokens += stats.offline_prefill_tokens + stats.offline_decode_tokens
        now.free_blocks += stats.blocks_free + stats.blocks_cached
        if stats.blocks_online > now.most_online_blocks:
            now.most_online_blocks = stats.blocks_online
        if self._stepped_s is not None and 0.0 < stats.now_s - self._stepped_s <= LONGEST_GAP_S:
            part = now.saturated
            part.seconds += stats.now_s - self._stepped_s
            part.steps += 1
            part.online_tokens += online
            part.online_kv_tokens += kv_tokens
            part.prefill_tokens += stats.offline_prefill_tokens
            part.decode_tokens += stats.offline_decode_tokens
            part.row_steps += stats.running_offline
            part.kv_tokens += stats.blocks_offline * self.block_size
        self._stepped_s = stats.now_s if stats.waiting_offline else None

    def on_request(self, tier: str, key: str | None, prompt_tokens: int, answer_tokens: int) -> None:
        """Notes the end of a request that is no batch line."""
        now = self._current
        if now is None:
            return
        now.requests[tier] = now.requests.get(tier, 0) + 1
        if key is not None:
            name = key if key in now.keys or len(now.keys) < MAX_KEYS else OTHER
            now.keys[name] = now.keys.get(name, 0) + 1
        for buckets, length in ((now.prompt_tokens, prompt_tokens), (now.answer_tokens, answer_tokens)):
            bucket = length_bucket(length)
            buckets[bucket] = buckets.get(bucket, 0) + 1

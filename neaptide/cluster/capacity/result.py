"""The result of a capacity plan, with the keys of its JSON."""

import msgspec

from neaptide.durations import HOUR_S

MILLION = 1e6


class Beside(msgspec.Struct, kw_only=True):
    """A part of the trace with offline work, on all replicas together."""

    start_s: float
    end_s: float
    """Trace times."""
    tokens_per_s: float
    """Logical offline tokens per second."""
    attainment: dict[str, float]
    """For the online requests."""
    holds: bool
    valid: bool
    """False if the offline pool ran out of work."""
    samples: int = 1
    """Number of evenly spaced parts of it that were simulated; 1 if all of it was."""


class Point(msgspec.Struct, kw_only=True):
    """A size, and the result of the peak on it."""

    replicas: int
    kv_blocks: int
    """KV blocks of each replica."""
    kv_gib: float
    """KV memory of each replica."""
    attainment: dict[str, float]
    too_large: int
    """Requests of the peak that exceed this memory; they count as missed."""
    holds: bool
    beside: Beside | None = None
    """The peak with offline work; None if it was not simulated."""


class Peak(msgspec.Struct, kw_only=True):
    start_s: float
    end_s: float
    """Trace times."""
    requests: int
    work_s: float
    """Busy time of one replica for the peak's work."""


class OfflinePlan(msgspec.Struct, kw_only=True):
    rows: int
    tokens: int
    """Prompt and answer tokens, as far as they fit."""
    whole: Beside
    """The whole trace."""
    tokens_per_day: float
    """If the trace repeated all day."""
    alone_tokens_per_s: float
    """One replica of the answer's size without online work."""
    finish_s: tuple[float | None, float | None]
    """Low and high time for all rows, at the rates of the whole trace and of its peak, the faster one first. None: no
    offline work is done at that rate."""


class TriedLimits(msgspec.Struct, kw_only=True):
    """Step tokens and slots that were tried for a policy."""

    policy: str
    """With its limits."""
    replicas: int | None
    """None: no size met the targets."""
    attained: float | None
    offline_tokens_per_s: float | None
    """For the whole trace."""


class Plan(msgspec.Struct, kw_only=True):
    profile: str
    policy: str
    """With its limits, if it has its own."""
    devices: int
    """Devices per replica."""
    price_per_hour: float | None
    """Price of one replica."""
    peak: Peak
    tried: list[Point]
    """Smallest size first."""
    answer: Point | None
    one_smaller: Point | None
    """The next smaller size, which fails. None if the answer is the smallest possible size."""
    is_monotone: bool
    """Whether no tried size fails above one that is enough. The size above the answer was tried if it exists."""
    offline: OfflinePlan | None = None

    finds_memory: bool = False
    """Whether KV memory was searched, and not the number of replicas."""
    limits: list[TriedLimits] = []
    """The limits from which this plan's were chosen; empty if they were given."""

    @property
    def unit_price(self) -> float:
        """Hourly price of a replica, or its number of devices if there is no price."""
        return self.devices if self.price_per_hour is None else self.price_per_hour

    @property
    def cost(self) -> float | None:
        """Hourly cost of the answer, or its number of devices if there is no price; None without an answer."""
        return None if self.answer is None else self.answer.replicas * self.unit_price

    @property
    def price_per_million_tokens(self) -> float | None:
        """The whole cost over the offline tokens of an hour; None without any."""
        if self.cost is None or self.offline is None or not self.offline.whole.tokens_per_s:
            return None
        return MILLION * self.cost / (HOUR_S * self.offline.whole.tokens_per_s)

    @property
    def alone_price_per_token(self) -> float | None:
        """Price of an offline token on a replica without chats; None without offline work."""
        if self.offline is None or not self.offline.alone_tokens_per_s:
            return None
        return self.unit_price / (HOUR_S * self.offline.alone_tokens_per_s)

"""What a plan says, under the keys of its JSON."""

import msgspec


class Beside(msgspec.Struct, kw_only=True):
    """A stretch of the trace with offline work beside it, on all replicas together."""

    start_s: float
    end_s: float
    """In the trace."""
    tokens_per_s: float
    """Offline, logical."""
    attainment: dict[str, float]
    """Of the online requests beside it."""
    holds: bool
    valid: bool
    """False if the offline pool ran dry."""


class Point(msgspec.Struct, kw_only=True):
    """A size, and what became of the peak on it."""

    replicas: int
    kv_blocks: int
    """Of each replica ..."""
    kv_gib: float
    """... and the memory that they take."""
    attainment: dict[str, float]
    too_large: int
    """Requests of the peak that this memory does not hold whole; they count as missed."""
    holds: bool
    beside: Beside | None = None
    """The peak with offline work; None where it was not simulated."""


class Peak(msgspec.Struct, kw_only=True):
    start_s: float
    end_s: float
    """In the trace."""
    requests: int
    work_s: float
    """Of one replica, were nothing but work to be done."""


class OfflinePlan(msgspec.Struct, kw_only=True):
    rows: int
    tokens: int
    """Prompts and answers, as far as they fit."""
    whole: Beside
    """The whole trace."""
    tokens_per_day: float
    """If the trace came again and again."""
    finish_s: tuple[float | None, float | None]
    """Low and high: all rows at the rate beside the whole trace, and at that beside its peak; the faster one first.
    None: nothing is done there."""


class Plan(msgspec.Struct, kw_only=True):
    profile: str
    devices: int
    """Of one replica."""
    price_per_hour: float | None
    """Of one replica."""
    peak: Peak
    tried: list[Point]
    """The smallest size first."""
    answer: Point | None
    one_smaller: Point | None
    """Simulated too, and it does not hold. None if the answer is the smallest that there is."""
    is_monotone: bool
    """No size that was tried fails above one that holds; the one above the answer was, if there is one."""
    offline: OfflinePlan | None = None

    @property
    def cost(self) -> float | None:
        """What the answer costs an hour, or where no price is given, its devices; None without an answer."""
        if self.answer is None:
            return None
        return self.answer.replicas * (self.devices if self.price_per_hour is None else self.price_per_hour)

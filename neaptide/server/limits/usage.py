"""Counts of what one key has used, in the last minute and in each day. Reads no clock.

A minute is any 60 seconds, not one of the clock: a burst at the end of one minute counts in the next. Amounts are kept
in slots, and a slot counts until its youngest amount is 60 s old. So no 60 seconds ever have more than the limit. A day
is one of UTC.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from neaptide.durations import DAY_S

MINUTE_S = 60.0
KEPT_DAYS = 3
"""Days whose counts are kept. A clock that was set forward and back finds the count of today."""


class LimitName(StrEnum):
    """One limit of a key; also its field in the key file."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"


@dataclass(slots=True, frozen=True)
class KeyLimits:
    """Limits of one key; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    def items(self) -> list[tuple[LimitName, int]]:
        """The limits that are set."""
        found = ((name, getattr(self, name.value)) for name in LimitName)
        return [(name, limit) for name, limit in found if limit is not None]


NO_LIMITS = KeyLimits()


class Times(NamedTuple):
    """The present: seconds of a clock that never jumps, for minutes, and unix seconds, for days."""

    steady_s: float
    unix_s: float


class Excess(NamedTuple):
    """Why a request is refused."""

    name: LimitName
    limit: int
    used: int
    wanted: int
    wait_s: float | None
    """Time until there is room for it; None: it is larger than the limit."""


class Place(NamedTuple):
    """Slot and day under which an amount was counted, so that it can be given back."""

    slot: int
    day: int


class Level(NamedTuple):
    """How much of a limit is used."""

    used: int
    reset_s: float
    """Time until nothing is used, if nothing more comes."""


class _Slot(msgspec.Struct, array_like=True):
    """Amounts of about the same time."""

    amount: int
    last_s: float
    """Time of the youngest of them."""


class _Counts(msgspec.Struct):
    requests: dict[int, _Slot] = {}
    tokens: dict[int, _Slot] = {}
    days: dict[int, int] = {}


class KeyUsage:
    """Counts of one key.

    Args:
        slot_s: width of a slot.
        late_s: longest time from counting an amount to its use.
    """

    def __init__(self, slot_s: float, late_s: float = 0.0) -> None:
        self._slot_s = slot_s
        self._life_s = MINUTE_S + late_s
        self._counts = _Counts()

    def decode(self, text: str) -> None:
        """Takes over counts as ``encoded`` has written them. Raises msgspec.MsgspecError."""
        self._counts = msgspec.json.decode(text, type=_Counts, strict=False)

    def encoded(self) -> str:
        """The counts as JSON."""
        return msgspec.json.encode(self._counts).decode()

    def forget_minutes(self) -> None:
        """Keeps the counts of days only."""
        self._counts = _Counts(days=self._counts.days)

    def encoded_days(self) -> str:
        """The counts of days as JSON."""
        return msgspec.json.encode(_Counts(days=self._counts.days)).decode()

    def take(self, limits: KeyLimits, amounts: Mapping[LimitName, int], now: Times) -> Excess | None:
        """Counts the amounts if all of them fit; else nothing, and says what does not."""
        if (excess := self.excess(limits, amounts, now)) is not None:
            return excess
        for name, _ in limits.items():
            self.add(name, amounts[name], now)
        return None

    def excess(self, limits: KeyLimits, amounts: Mapping[LimitName, int], now: Times) -> Excess | None:
        """What does not fit; None: all of it fits."""
        for name, limit in limits.items():
            used, wanted = self.level(name, now).used, amounts[name]
            if used + wanted > limit:
                wait_s = None if wanted > limit else self._wait_s(name, used + wanted - limit, now)
                return Excess(name, limit, used, wanted, wait_s)
        return None

    def add(self, name: LimitName, amount: int, now: Times) -> None:
        """Counts an amount, whether it fits or not."""
        place = self.place(now)
        if name is LimitName.TOKENS_PER_DAY:
            days = self._counts.days
            days[place.day] = days.get(place.day, 0) + amount
            if len(days) > KEPT_DAYS:
                del days[next(iter(days))]
        elif amount:
            slot = self._slots(name).setdefault(place.slot, _Slot(0, now.steady_s))
            slot.amount, slot.last_s = slot.amount + amount, now.steady_s

    def give_back(self, name: LimitName, amount: int, place: Place) -> None:
        """Counts an amount no longer. What no longer counts anyway changes nothing."""
        if name is LimitName.TOKENS_PER_DAY:
            if place.day in self._counts.days:
                self._counts.days[place.day] = max(0, self._counts.days[place.day] - amount)
        elif (slot := self._slots(name).get(place.slot)) is not None:
            slot.amount = max(0, slot.amount - amount)

    def level(self, name: LimitName, now: Times) -> Level:
        """How much is used now."""
        if name is LimitName.TOKENS_PER_DAY:
            used = self._counts.days.get(self.place(now).day, 0)
            return Level(used, _day_end_s(now) if used else 0.0)
        self._forget(name, now)
        found = [slot for slot in self._slots(name).values() if slot.amount]
        used, last_s = sum(slot.amount for slot in found), max((slot.last_s for slot in found), default=0.0)
        return Level(used, last_s + self._life_s - now.steady_s if used else 0.0)

    def place(self, now: Times) -> Place:
        """Where amounts are counted now."""
        return Place(math.floor(now.steady_s / self._slot_s), math.floor(now.unix_s / DAY_S))

    def _wait_s(self, name: LimitName, too_much: int, now: Times) -> float:
        """Time until that much less counts."""
        if name is LimitName.TOKENS_PER_DAY:
            return _day_end_s(now)
        slots = iter(sorted(self._slots(name).values(), key=lambda slot: slot.last_s))
        slot = next(slots)
        while (too_much := too_much - slot.amount) > 0:
            slot = next(slots)
        return slot.last_s + self._life_s - now.steady_s

    def _forget(self, name: LimitName, now: Times) -> None:
        """Drops what no longer counts."""
        slots, place = self._slots(name), self.place(now)
        for at, slot in list(slots.items()):
            if slot.last_s + self._life_s <= now.steady_s:
                del slots[at]
            elif at > place.slot:
                # The clock went back. Without this the key would wait for the old time.
                del slots[at]
                self.add(name, slot.amount, now)

    def _slots(self, name: LimitName) -> dict[int, _Slot]:
        return self._counts.requests if name is LimitName.REQUESTS_PER_MINUTE else self._counts.tokens


def _day_end_s(now: Times) -> float:
    return DAY_S - now.unix_s % DAY_S

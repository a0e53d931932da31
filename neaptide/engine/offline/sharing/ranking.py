"""Some thousand members in a sorted order, of which one moves at a time, and orders that differ from it a little."""

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)
Key = tuple[Any, ...]
"""Unique among those of one order, so that members are never compared."""


class Order(Protocol[T]):
    """Members by their keys, the smallest first."""

    def __contains__(self, member: T) -> bool: ...

    @property
    def first(self) -> T | None: ...

    def key(self, member: T) -> Key:
        """Of a member that is in the order."""

    def place(self, member: T, key: Key) -> None:
        """Gives a member its place, wherever it stood before, if anywhere."""

    def remove(self, member: T) -> None:
        """Takes one out that is in the order."""


class Ranking(Generic[T]):
    """An ``Order`` of its own. To look, to place and to remove cost next to nothing, however many there are."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, T]] = []
        self._keys: dict[T, Key] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, member: T) -> bool:
        return member in self._keys

    @property
    def first(self) -> T | None:
        return self._entries[0][1] if self._entries else None

    def at(self, place: int) -> T | None:
        """None behind the last."""
        return self._entries[place][1] if place < len(self._entries) else None

    def key(self, member: T) -> Key:
        return self._keys[member]

    def place(self, member: T, key: Key) -> None:
        if (old := self._keys.get(member)) is not None:
            if old == key:
                return
            del self._entries[bisect_left(self._entries, (old,))]
        self._keys[member] = key
        insort(self._entries, (key, member), key=lambda entry: entry[0])

    def remove(self, member: T) -> None:
        del self._entries[bisect_left(self._entries, (self._keys.pop(member),))]


class RankingDraft(Generic[T]):
    """An ``Order`` in differences to another one, which must not change meanwhile."""

    def __init__(self, ranking: Ranking[T]) -> None:
        self._ranking = ranking
        self._at = 0
        """Where the first one stands that has not moved."""
        self._own = Ranking[T]()
        """Those that have been placed ..."""
        self._moved: set[T] = set()
        """... and those and the ones that have been removed."""

    def __contains__(self, member: T) -> bool:
        return member in self._own or (member in self._ranking and member not in self._moved)

    @property
    def first(self) -> T | None:
        while (other := self._ranking.at(self._at)) is not None and other in self._moved:
            self._at += 1
        own = self._own.first
        if own is None or other is None:
            return other if own is None else own
        return own if self._own.key(own) < self._ranking.key(other) else other

    def key(self, member: T) -> Key:
        return self._own.key(member) if member in self._own else self._ranking.key(member)

    def place(self, member: T, key: Key) -> None:
        self._moved.add(member)
        self._own.place(member, key)

    def remove(self, member: T) -> None:
        self._moved.add(member)
        if member in self._own:
            self._own.remove(member)

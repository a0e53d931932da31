"""Sorted order of several thousand members of which one moves at a time, and previews of it."""

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)
Key = tuple[Any, ...]
"""Sort key; unique within an order, so that members are never compared."""


class Order(Protocol[T]):
    """Members by their keys, the smallest first."""

    def __contains__(self, member: T) -> bool: ...

    @property
    def first(self) -> T | None: ...

    def key(self, member: T) -> Key:
        """Key of a member of the order."""

    def place(self, member: T, key: Key) -> None:
        """Places a member, or moves it."""

    def remove(self, member: T) -> None:
        """Removes a member of the order."""


class Ranking(Generic[T]):
    """A sorted list. Lookup, placing and removal are cheap at any size."""

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
        """Member at an index; None after the last."""
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
        """Index of the first member that has not moved."""
        self._own = Ranking[T]()
        """Members that have been placed."""
        self._moved: set[T] = set()
        """Members that have been placed or removed."""

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

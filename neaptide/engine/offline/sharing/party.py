"""Who has had how much of what is shared, and who is next."""

from collections import ChainMap
from collections.abc import Hashable, Mapping, MutableMapping
from typing import Generic, TypeVar

from neaptide.engine.offline.sharing.ranking import Key, Order, Ranking, RankingDraft

QUANTUM_TOKENS = 8192
"""A lane keeps its turn for so long: requests of a job that share a prefix run one after another."""

T = TypeVar("T", bound=Hashable)


class Turn(Generic[T]):
    """Deficit round robin in its stateless form: who has had the fewest whole quanta is next.

    Args:
        had: tokens of every member, by its weight.
        expected: those of them that stand for answers without an end.
        waiting: those members that wait, by their quanta and then by the rest of their keys.
    """

    def __init__(self, had: MutableMapping[T, float], expected: MutableMapping[T, float], waiting: Order[T]) -> None:
        self.had = had
        self.expected = expected
        self.waiting = waiting

    def charge(self, member: T, num_tokens: float, expected: float) -> None:
        """For so many tokens; so many of an answer are from now on expected, or expected no longer."""
        if member in self.had:
            self.had[member] += num_tokens
        if expected > 0 or member in self.expected:  # else it was forgotten
            self.expected[member] = self.expected.get(member, 0.0) + expected

    def settled(self, member: T) -> float:
        """Tokens that it has had if answers count when they end."""
        return self.had[member] - self.expected.get(member, 0.0)

    def place(self, member: T, among_equals: Key) -> None:
        """Puts a member among those that wait.

        Args:
            among_equals: its place among those that have had as many quanta.
        """
        self.waiting.place(member, (self.quanta(member), *among_equals))

    def quanta(self, member: T) -> float:
        """Whole ones that it has had."""
        return self.had[member] // QUANTUM_TOKENS


class Party(Turn[T]):
    """The turn itself, with members that come and go.

    A member owes, or is owed, only as long as somebody waits. What it did not use while it had nothing to do, it does
    not get later; what it has had while others waited still counts when it goes and comes back. When nobody waits,
    everybody has had what he asked for, and whoever comes next begins anew: then what one had alone costs him nothing.
    """

    def __init__(self) -> None:
        self.present = Ranking[T]()
        super().__init__({}, {}, self.present)

    def come(self, member: T, to_come: Mapping[T, float], among_equals: Key) -> None:
        """The member waits from now on.

        Args:
            to_come: what members have been charged for and have yet to have, by their weights.
        """
        if self.present.first is None:
            self.had = {one: tokens for one, tokens in to_come.items() if one != member}
            self.had[member] = to_come.get(member, 0.0)
        else:
            first = self.present.first
            others = [first, *(one for one in to_come if one in self.present)]
            # What is still to come comes while the other waits: neither is behind the other by that.
            least = min(self.had[one] - to_come.get(one, 0.0) for one in others)
            self.had[member] = max(self.had.get(member, 0.0), least + to_come.get(member, 0.0))
        self.place(member, among_equals)

    def go(self, member: T) -> None:
        """It has nothing left that waits."""
        self.present.remove(member)

    def forget(self, member: T) -> None:
        """One that does not wait will never come back."""
        self.had.pop(member, None)
        self.expected.pop(member, None)

    def ahead(self) -> Turn[T]:
        """To look ahead with, while nothing changes here."""
        return Turn(ChainMap({}, self.had), ChainMap({}, self.expected), RankingDraft(self.present))

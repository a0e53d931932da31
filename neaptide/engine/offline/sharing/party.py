"""Who has had how much of what is shared, and who is next."""

from collections import ChainMap, Counter
from collections.abc import Hashable, MutableMapping
from typing import Generic, TypeVar

from neaptide.engine.offline.sharing.ranking import Key, Order, Ranking, RankingDraft

QUANTUM_TOKENS = 8192
"""A lane keeps its turn for so long: requests of a job that share a prefix run one after another."""

T = TypeVar("T", bound=Hashable)


class Turn(Generic[T]):
    """Deficit round robin in its stateless form: who has had the fewest whole quanta is next.

    Args:
        had: tokens of every member, by its weight.
        to_come: those of them that it has yet to have, as far as it is known how far answers are.
        waiting: those members that wait, by their quanta and then by the rest of their keys.
    """

    def __init__(self, had: MutableMapping[T, float], to_come: MutableMapping[T, float], waiting: Order[T]) -> None:
        self.had = had
        self.to_come = to_come
        self.waiting = waiting

    def hand_out(self, member: T, prompt_tokens: float, answer_tokens: float) -> None:
        """Charges a member that waits for a request; its answer is expected to have so many tokens."""
        self.had[member] += prompt_tokens + answer_tokens
        self.to_come[member] = self.to_come.get(member, 0.0) + answer_tokens
        self.replace(member)

    def served(self, member: T) -> float:
        """Tokens that it has had without those that are yet to come."""
        return self.had[member] - self.to_come.get(member, 0.0)

    def place(self, member: T, among_equals: Key) -> None:
        """Puts a member among those that wait.

        Args:
            among_equals: its place among those that have had as many quanta.
        """
        self.waiting.place(member, (self.had[member] // QUANTUM_TOKENS, *among_equals))

    def replace(self, member: T) -> None:
        """What it has had is another: it has another place, if it waits."""
        if member in self.waiting:
            self.place(member, self.waiting.key(member)[1:])


class Party(Turn[T]):
    """The turn itself, with members that come and go.

    A member owes, or is owed, only as long as somebody waits. What it did not use while it had nothing to do, it does
    not get later; what it has had while others waited still counts when it goes and comes back. When nobody waits,
    everybody has had what he asked for, and whoever comes next begins anew: then what one had alone costs him nothing.
    """

    def __init__(self) -> None:
        self.present = Ranking[T]()
        super().__init__({}, {}, self.present)
        self._num_out = Counter[T]()
        """Requests without an end."""

    def come(self, member: T, among_equals: Key) -> None:
        """The member waits from now on."""
        first = self.present.first
        if first is None:
            self.had = {one: self.to_come.get(one, 0.0) for one in [*self._num_out, member]}
        else:
            # What is still to come comes while the other waits: neither is behind the other by that.
            others = [first, *(one for one in self._num_out if one in self.present)]
            least = min(map(self.served, others))
            self.had[member] = max(self.had.get(member, 0.0), least + self.to_come.get(member, 0.0))
        self.place(member, among_equals)

    def go(self, member: T) -> None:
        """It has nothing left that waits."""
        self.present.remove(member)

    def forget(self, member: T) -> None:
        """One that does not wait will never come back."""
        self.had.pop(member, None)

    def hand_out(self, member: T, prompt_tokens: float, answer_tokens: float) -> None:
        self._num_out[member] += 1
        super().hand_out(member, prompt_tokens, answer_tokens)

    def go_on(self, member: T, done_tokens: float, more_tokens: float) -> None:
        """So much more of an answer is there, and so much more is expected of it."""
        self.to_come[member] += more_tokens - done_tokens
        if more_tokens:
            self._charge(member, more_tokens)

    def end(self, member: T, num_tokens: float, expected_tokens: float, done_tokens: float) -> None:
        """An answer has ended with so many tokens; so many were expected, and so many were known to be there."""
        self._charge(member, num_tokens - expected_tokens)
        self._num_out[member] -= 1
        self.to_come[member] -= expected_tokens - done_tokens
        if not self._num_out[member]:
            del self._num_out[member], self.to_come[member]

    def ahead(self) -> Turn[T]:
        """To look ahead with, while nothing changes here."""
        return Turn(ChainMap({}, self.had), ChainMap({}, self.to_come), RankingDraft(self.present))

    def _charge(self, member: T, num_tokens: float) -> None:
        """Also of one that was forgotten."""
        if member in self.had:
            self.had[member] += num_tokens
            self.replace(member)

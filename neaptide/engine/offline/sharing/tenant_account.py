"""Deficit round robin accounting."""

from collections import ChainMap, Counter
from collections.abc import Hashable, MutableMapping
from typing import Generic, TypeVar

from neaptide.engine.offline.sharing.ranking import Key, Order, Ranking, RankingDraft

QUANTUM_TOKENS = 8192
"""Quantum: tokens of one turn. Within it, requests of a job that share a prefix run one after another."""

T = TypeVar("T", bound=Hashable)


class Turn(Generic[T]):
    """Deficit round robin in its stateless form: the member with the fewest whole quanta is next.

    Args:
        had: charged tokens of every member, divided by its weight.
        to_come: part of them that is not served yet, as far as it is known.
        waiting: waiting members, by their quanta and then by the rest of their keys.
    """

    def __init__(self, had: MutableMapping[T, float], to_come: MutableMapping[T, float], waiting: Order[T]) -> None:
        self.had = had
        self.to_come = to_come
        self.waiting = waiting

    def hand_out(self, member: T, prompt_tokens: float, answer_tokens: float) -> None:
        """Charges a waiting member for a request, with its expected answer."""
        self.had[member] += prompt_tokens + answer_tokens
        self.to_come[member] = self.to_come.get(member, 0.0) + answer_tokens
        self.replace(member)

    def served(self, member: T) -> float:
        """Charged tokens that have been served."""
        return self.had[member] - self.to_come.get(member, 0.0)

    def place(self, member: T, among_equals: Key) -> None:
        """Puts a member among the waiting ones.

        Args:
            among_equals: key among members with as many quanta.
        """
        self.waiting.place(member, (self.had[member] // QUANTUM_TOKENS, *among_equals))

    def replace(self, member: T) -> None:
        """Updates the place of a waiting member after a change of its tokens."""
        if member in self.waiting:
            self.place(member, self.waiting.key(member)[1:])


class Party(Turn[T]):
    """Accounts of members that come and go.

    Debts last only while a member waits. A member without work saves no credit, but tokens served to it while others
    waited still count when it returns. When no member waits, all have been served and the accounts start again: service
    without competition costs nothing.
    """

    def __init__(self) -> None:
        self.present = Ranking[T]()
        super().__init__({}, {}, self.present)
        self._num_out = Counter[T]()
        """Number of open requests of each member."""

    def come(self, member: T, among_equals: Key) -> None:
        """Adds a waiting member."""
        first = self.present.first
        if first is None:
            self.had = {one: self.to_come.get(one, 0.0) for one in [*self._num_out, member]}
        else:
            # Outstanding tokens of the others come while the new member waits, so it is credited with them.
            others = [first, *(one for one in self._num_out if one in self.present)]
            least = min(map(self.served, others))
            self.had[member] = max(self.had.get(member, 0.0), least + self.to_come.get(member, 0.0))
        self.place(member, among_equals)

    def go(self, member: T) -> None:
        """Removes a member without waiting work."""
        self.present.remove(member)

    def forget(self, member: T) -> None:
        """Drops the account of a member that will never return."""
        self.had.pop(member, None)

    def hand_out(self, member: T, prompt_tokens: float, answer_tokens: float) -> None:
        self._num_out[member] += 1
        super().hand_out(member, prompt_tokens, answer_tokens)

    def go_on(self, member: T, done_tokens: float, more_tokens: float) -> None:
        """Updates a running answer: ``done_tokens`` more are served, ``more_tokens`` more are expected."""
        self.to_come[member] += more_tokens - done_tokens
        if more_tokens:
            self._charge(member, more_tokens)

    def end(self, member: T, num_tokens: float, expected_tokens: float, done_tokens: float) -> None:
        """Ends an answer of ``num_tokens``, of which ``expected_tokens`` were charged and ``done_tokens`` known as
        served."""
        self._charge(member, num_tokens - expected_tokens)
        self._num_out[member] -= 1
        self.to_come[member] -= expected_tokens - done_tokens
        if not self._num_out[member]:
            del self._num_out[member], self.to_come[member]

    def ahead(self) -> Turn[T]:
        """A preview that does not change the accounts."""
        return Turn(ChainMap({}, self.had), ChainMap({}, self.to_come), RankingDraft(self.present))

    def _charge(self, member: T, num_tokens: float) -> None:
        """Charges a member; ignores one that was forgotten."""
        if member in self.had:
            self.had[member] += num_tokens
            self.replace(member)

"""Positions of outputs in their grammars. Outputs at the same position share one matcher; memory is bounded.

This module neither compiles, computes masks nor takes locks: ``neaptide.executors.grammar_masks`` does.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from neaptide.engine.arrays import TokenArray

MASK_BYTES_PER_S, COMPILE_BYTES_PER_S = 300e6, 100e6
"""Upper bounds of a matcher's growth while it computes masks and while it is compiled: it keeps all states it
visits."""
BASE_BYTES, BYTES_PER_CHARACTER = 300_000, 8
"""Size of a compiled grammar, without what its compilation added."""
MOST_BYTES = 256 << 20
"""Limit for all matchers together. Above it the least recently used are dropped. When needed again, they are rebuilt
from the whole output."""
MOST_UNUSED_BYTES = 16 << 20
"""Limit for compiled grammars that no request uses."""
MOST_COPIED_BYTES = 1 << 20
"""When outputs diverge, a larger matcher is not copied; the tokens are read again from the start."""

_NO_TOKENS: TokenArray = np.zeros(0, np.int32)
Bits = npt.NDArray[np.int32]


class GrammarPlace:
    """One output of one grammar, shared by all requests that have it.

    The code that sets ``is_busy`` owns the matcher until it clears the flag.
    """

    __slots__ = (
        "bits",
        "failed",
        "followed",
        "grammar",
        "is_busy",
        "is_queued",
        "late_s",
        "matcher",
        "num_bytes",
        "output",
        "users",
    )

    def __init__(self, grammar: "Grammar", output: TokenArray) -> None:
        self.grammar = grammar
        self.output = output
        self.matcher: LLMatcher | None = None
        self.followed = 0
        """Tokens of the output that the matcher has consumed."""
        self.bits: Bits | None = None
        """[ceil(vocabulary / 32)] The mask; None until it has been computed."""
        self.failed = False
        """The grammar does not allow the output, or has become too complex."""
        self.is_busy = False
        self.is_queued = False
        """The place is in the queue for slow masks."""
        self.late_s = 0.0
        """Estimated delay of the mask, set when the place is queued."""
        self.users = 0
        self.num_bytes = 0

    @property
    def is_done(self) -> bool:
        return self.failed or self.bits is not None


class Grammar:
    """A grammar, its measured cost, and the places of its outputs."""

    __slots__ = ("cost_s", "places", "root", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.cost_s: float | None = None
        """Processor time of a mask in seconds, decaying from the slowest of the recent ones; None before the first."""
        self.root = GrammarPlace(self, _NO_TOKENS)
        """Its matcher is the compiled grammar. It lives as long as the grammar, and is copied, never moved."""
        self.places: dict[bytes, GrammarPlace] = {b"": self.root}

    def took(self, seconds: float | None) -> None:
        """Records the processor time of a mask, in seconds; None if only a lower bound is known."""
        self.cost_s = None if seconds is None else max(seconds, 0.9 * (self.cost_s or 0.0))


class Follower:
    """The place of one request's output in its grammar.

    It is given the whole output at every step, not only the last token. After a preemption, an undone step or a retry
    in parts, the output may be shorter or different.
    """

    __slots__ = ("grammar", "place")

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.place: GrammarPlace | None = None


class GrammarPlaces:
    """All places and the memory of their matchers."""

    def __init__(self, most_bytes: int = MOST_BYTES, most_unused_bytes: int = MOST_UNUSED_BYTES) -> None:
        self._most_bytes, self._most_unused_bytes = most_bytes, most_unused_bytes
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        """Least recently requested first."""
        self._held: OrderedDict[GrammarPlace, None] = OrderedDict()
        """Places with a matcher of their own, least recently used first."""
        self.num_bytes = 0
        """An estimate that errs on the large side."""
        self.dropped_bytes = 0
        """Memory of the matchers dropped since this was set to 0."""

    def move(self, follower: Follower, output: TokenArray) -> GrammarPlace:
        """Moves a follower to the place of this output. A matcher that no other request needs moves along."""
        left = follower.place
        key = output.tobytes()
        if left is not None and left.output.nbytes == len(key) and left.output.tobytes() == key:
            return left
        grammar = self._grammar(follower.grammar) if left is None else left.grammar
        place = grammar.places.get(key)
        if place is None:
            place = grammar.places[key] = GrammarPlace(grammar, output)
            self._begin(place, left)
        place.users += 1
        follower.place = place
        self._forsake(left)
        return place

    def leave(self, follower: Follower) -> None:
        """Removes a follower whose request has ended."""
        self._forsake(follower.place)
        follower.place = None
        self._trim()

    def prepare(self, place: GrammarPlace) -> None:
        """Gives a place whose matcher was dropped a copy of the compiled grammar, if there is one."""
        if place.matcher is None:
            self._begin(place, None)

    def is_wanted(self, place: GrammarPlace) -> bool:
        """Whether a request is at the place, or new ones will start there."""
        return bool(place.users) or place is place.grammar.root

    def give_back(
        self, place: GrammarPlace, matcher: LLMatcher | None = None, followed: int = 0, grown_bytes: int = 0
    ) -> None:
        """Clears the busy flag and stores the matcher, which has consumed ``followed`` tokens; None drops it."""
        place.is_busy = False
        if matcher is None or not self.is_wanted(place):
            self._drop(place)
        else:
            place.matcher, place.followed = matcher, followed
            self._account(place, max(place.num_bytes, least_bytes(place.grammar)) + grown_bytes)
        self._trim()

    def _grammar(self, text: str) -> Grammar:
        grammar = self._grammars.get(text)
        if grammar is None:
            grammar = self._grammars[text] = Grammar(text)
        self._grammars.move_to_end(text)
        return grammar

    def _begin(self, place: GrammarPlace, left: GrammarPlace | None) -> None:
        """Gives a new place the previous place's matcher or a copy of it; failing that, a copy of the root's."""
        root = place.grammar.root
        if left is None or left.matcher is None or left.is_busy or not _goes_on(place.output, left.output):
            left = root
        if left is not root and left.users > 1 and left.num_bytes > MOST_COPIED_BYTES:
            left = root
        if left.matcher is None or left.is_busy:
            return
        is_last = left is not root and left.users == 1
        place.matcher = left.matcher if is_last else left.matcher.deep_copy()
        place.followed = left.followed
        self._account(place, left.num_bytes)
        if is_last:
            left.matcher = None
            self._account(left, 0)

    def _forsake(self, place: GrammarPlace | None) -> None:
        if place is None:
            return
        place.users -= 1
        if not place.users and place is not place.grammar.root:
            del place.grammar.places[place.output.tobytes()]
            if not place.is_busy:
                self._drop(place)

    def _drop(self, place: GrammarPlace) -> None:
        """Drops the place's matcher."""
        self.dropped_bytes += place.num_bytes
        place.matcher, place.followed = None, 0
        self._account(place, 0)

    def _account(self, place: GrammarPlace, num_bytes: int) -> None:
        """Records the matcher's size and its use."""
        self.num_bytes += num_bytes - place.num_bytes
        place.num_bytes = num_bytes
        self._held.pop(place, None)
        if num_bytes:
            self._held[place] = None

    def _trim(self) -> None:
        """Drops matchers until memory is within its limits."""
        for grammar in self._unused():
            del self._grammars[grammar.text]
            self._drop(grammar.root)
        if self.num_bytes > self._most_bytes:
            for place in [place for place in self._held if not place.is_busy]:
                self._drop(place)
                if self.num_bytes <= self._most_bytes:
                    break

    def _unused(self) -> Iterator[Grammar]:
        """Grammars without requests that exceed the limit for unused ones, oldest first."""
        idle = [
            one
            for one in self._grammars.values()
            if len(one.places) == 1 and not one.root.users and not one.root.is_busy
        ]
        num_bytes = sum(_kept_bytes(grammar) for grammar in idle)
        for grammar in idle:
            if num_bytes <= self._most_unused_bytes:
                return
            num_bytes -= _kept_bytes(grammar)
            yield grammar


def least_bytes(grammar: Grammar) -> int:
    """Smallest estimate of a compiled grammar's size."""
    return BASE_BYTES + BYTES_PER_CHARACTER * len(grammar.text)


def _kept_bytes(grammar: Grammar) -> int:
    return max(grammar.root.num_bytes, least_bytes(grammar))


def _goes_on(output: TokenArray, before: TokenArray) -> bool:
    """Whether ``output`` is ``before`` plus at least one token."""
    return len(output) > len(before) and np.array_equal(output[: len(before)], before)

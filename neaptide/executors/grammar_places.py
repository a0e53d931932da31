"""Places of outputs in their grammars. Outputs at the same place share one matcher; their memory is bounded.

Nothing here compiles, computes a mask or takes a lock: ``neaptide.executors.grammar_masks`` does.
"""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from neaptide.engine.arrays import TokenArray

MASK_BYTES_PER_S, COMPILE_BYTES_PER_S = 300e6, 100e6
"""What a matcher grows by while it computes masks, and while it is compiled, at most: it keeps the states that it comes
to."""
BASE_BYTES, BYTES_PER_CHARACTER = 300_000, 8
"""What a compiled grammar takes before that, beside what compiling it made."""
MOST_BYTES = 256 << 20
"""All matchers together. Over it those that were used longest ago are dropped: they are made again when they are asked
for, from the whole output."""
MOST_UNUSED_BYTES = 16 << 20
"""Bound on the memory of compiled grammars that no request uses."""
MOST_COPIED_BYTES = 1 << 20
"""A larger matcher is not copied where outputs part: their tokens are read again from the start."""

_NO_TOKENS: TokenArray = np.zeros(0, np.int32)
Bits = npt.NDArray[np.int32]


class Place:
    """One output of one grammar, be it that of many requests.

    Whoever sets ``is_busy`` has the matcher for himself until he takes it back.
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
        """[ceil(vocabulary / 32)] the mask; None until it has been computed."""
        self.failed = False
        """The grammar does not allow the output, or has become too complex."""
        self.is_busy = False
        self.is_queued = False
        """It has been put into the queue of those that are not quick."""
        self.late_s = 0.0
        """When it was put into the queue: how long until its mask is there."""
        self.users = 0
        self.num_bytes = 0

    @property
    def is_done(self) -> bool:
        return self.failed or self.bits is not None


class Grammar:
    """What is known of a grammar, and the places of its outputs."""

    __slots__ = ("cost_s", "places", "root", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.cost_s: float | None = None
        """Seconds of processor time of a mask, by the slowest of the recent ones; None before the first."""
        self.root = Place(self, _NO_TOKENS)
        """Its matcher is the compiled grammar. It stays as long as the grammar is kept, and is copied, never moved."""
        self.places: dict[bytes, Place] = {b"": self.root}

    def took(self, seconds: float | None) -> None:
        """Notes the processor time of a mask, in seconds; None if only a lower bound is known."""
        self.cost_s = None if seconds is None else max(seconds, 0.9 * (self.cost_s or 0.0))


class Follower:
    """Place of one request's output in its grammar.

    It is told the whole output at every step and not the last token: after a preemption, a step that was undone or one
    that is run again in parts, the output may be shorter than it was, or another.
    """

    __slots__ = ("grammar", "place")

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.place: Place | None = None


class Places:
    """All places, and what their matchers take."""

    def __init__(self, most_bytes: int = MOST_BYTES, most_unused_bytes: int = MOST_UNUSED_BYTES) -> None:
        self._most_bytes, self._most_unused_bytes = most_bytes, most_unused_bytes
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        """The one that was asked for longest ago first."""
        self._held: OrderedDict[Place, None] = OrderedDict()
        """Those with a matcher of their own, likewise."""
        self.num_bytes = 0
        """An estimate that errs on the large side."""
        self.dropped_bytes = 0
        """Memory of the matchers that were dropped since this was set to 0."""

    def move(self, follower: Follower, output: TokenArray) -> Place:
        """The place behind this output, where the follower stands from now on. The matcher goes with the last one."""
        left = follower.place
        key = output.tobytes()
        if left is not None and left.output.nbytes == len(key) and left.output.tobytes() == key:
            return left
        grammar = self._grammar(follower.grammar) if left is None else left.grammar
        place = grammar.places.get(key)
        if place is None:
            place = grammar.places[key] = Place(grammar, output)
            self._begin(place, left)
        place.users += 1
        follower.place = place
        self._forsake(left)
        return place

    def leave(self, follower: Follower) -> None:
        """The request has ended."""
        self._forsake(follower.place)
        follower.place = None
        self._trim()

    def prepare(self, place: Place) -> None:
        """Gives a place whose matcher was dropped a copy of the compiled grammar, if that is there."""
        if place.matcher is None:
            self._begin(place, None)

    def is_wanted(self, place: Place) -> bool:
        """Whether a request stands there, or may come to."""
        return bool(place.users) or place is place.grammar.root

    def give_back(
        self, place: Place, matcher: LLMatcher | None = None, followed: int = 0, grown_bytes: int = 0
    ) -> None:
        """The place is no longer busy. Its matcher has consumed so many tokens, and has grown; None is of no use."""
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

    def _begin(self, place: Place, left: Place | None) -> None:
        """Gives a new place the matcher of the one before it, or a copy: of the root's where there is none."""
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

    def _forsake(self, place: Place | None) -> None:
        if place is None:
            return
        place.users -= 1
        if not place.users and place is not place.grammar.root:
            del place.grammar.places[place.output.tobytes()]
            if not place.is_busy:
                self._drop(place)

    def _drop(self, place: Place) -> None:
        """Its matcher goes."""
        self.dropped_bytes += place.num_bytes
        place.matcher, place.followed = None, 0
        self._account(place, 0)

    def _account(self, place: Place, num_bytes: int) -> None:
        """Notes what the matcher takes now, and that it was used."""
        self.num_bytes += num_bytes - place.num_bytes
        place.num_bytes = num_bytes
        self._held.pop(place, None)
        if num_bytes:
            self._held[place] = None

    def _trim(self) -> None:
        """Keeps to the bounds."""
        for grammar in self._unused():
            del self._grammars[grammar.text]
            self._drop(grammar.root)
        if self.num_bytes > self._most_bytes:
            for place in [place for place in self._held if not place.is_busy]:
                self._drop(place)
                if self.num_bytes <= self._most_bytes:
                    break

    def _unused(self) -> Iterator[Grammar]:
        """Grammars that no request has and that are more than are kept, the oldest first."""
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
    """What it takes compiled, whatever it is."""
    return BASE_BYTES + BYTES_PER_CHARACTER * len(grammar.text)


def _kept_bytes(grammar: Grammar) -> int:
    return max(grammar.root.num_bytes, least_bytes(grammar))


def _goes_on(output: TokenArray, before: TokenArray) -> bool:
    """Whether the output is the one before and at least a token more."""
    return len(output) > len(before) and np.array_equal(output[: len(before)], before)

"""Tokens that were sampled a moment ago, and that the host may not know yet."""

from typing import Generic, Protocol, TypeVar


class SampledLater(Protocol):
    """A token of a step that may still run."""

    def wait(self) -> int:
        """The token, once its step is done."""
        ...


Sampled = TypeVar("Sampled", bound=SampledLater)


class RecentTokens(Generic[Sampled]):
    """The last two tokens that a request sampled, by their index in its output.

    Two, because a step that raised may be submitted again in parts after it has sampled for some: the token that it
    reads is then the last but one.
    """

    __slots__ = ("_last", "_last_position", "_previous")

    def __init__(self) -> None:
        self._last: Sampled | None = None
        self._last_position = -1
        self._previous: Sampled | None = None

    def keep(self, output_position: int, sampled: Sampled) -> None:
        if output_position != self._last_position:
            self._previous = self._last if output_position == self._last_position + 1 else None
        self._last, self._last_position = sampled, output_position

    def at(self, output_position: int) -> Sampled | None:
        if output_position == self._last_position:
            return self._last
        return self._previous if output_position == self._last_position - 1 else None

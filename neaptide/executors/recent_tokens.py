"""Recently sampled tokens, which the host may not know yet."""

from typing import Generic, Protocol, TypeVar


class SampledLater(Protocol):
    """A token of a step that may still be running."""

    def wait(self) -> int:
        """The token, once its step is done."""
        ...


Sampled = TypeVar("Sampled", bound=SampledLater)


class RecentTokens(Generic[Sampled]):
    """The last two tokens that a request sampled, by their index in its output.

    Two, because a step that raised may be retried in parts after it has sampled for some requests. The retry reads the
    second last token.
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

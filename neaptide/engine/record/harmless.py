"""Guards the engine against errors of its recorders: an error ends the record only."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")


class Recorder(Protocol):
    failed: bool
    """Whether the record has ended."""

    def give_up(self, error: Exception) -> None: ...


R = TypeVar("R", bound=Recorder)


def harmless(record: Callable[Concatenate[R, P], None]) -> Callable[Concatenate[R, P], None]:
    """Decorator for a recorder's method. An exception ends the record; later calls do nothing."""

    @functools.wraps(record)
    def guarded(recorder: R, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if recorder.failed:
            return
        try:
            record(recorder, *args, **kwargs)
        except Exception as error:
            recorder.give_up(error)

    return guarded

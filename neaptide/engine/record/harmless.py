"""Recording never harms the engine: what goes wrong ends the record."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")


class Recorder(Protocol):
    failed: bool
    """Nothing more is recorded."""

    def give_up(self, error: Exception) -> None: ...


R = TypeVar("R", bound=Recorder)


def harmless(record: Callable[Concatenate[R, P], None]) -> Callable[Concatenate[R, P], None]:
    """A method of a recorder that does nothing once it has failed, and ends the record where it raises."""

    @functools.wraps(record)
    def guarded(recorder: R, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if recorder.failed:
            return
        try:
            record(recorder, *args, **kwargs)
        except Exception as error:
            recorder.give_up(error)

    return guarded

"""A connection to PostgreSQL whose waits all end at the deadline of the call."""

from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

from neaptide.server.batches.storing.databases import deadline

T = TypeVar("T")


class BoundedConnection(psycopg.Connection[Any]):
    """PostgreSQL connection that closes its socket at the deadline, and then fails the call.

    It sends no cancel request. That would end the wait of a COMMIT for a standby, and the COMMIT would succeed.
    """

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        """Waits as ``psycopg.Connection`` does. Raises psycopg.OperationalError at the deadline."""
        try:
            return super().wait(_bounded(gen), *args, **kwargs)
        except _NoAnswerError:
            self.close()
            raise

    @classmethod
    def _connect_gen(cls, *args: Any, **kwargs: Any) -> Any:
        return _bounded(super()._connect_gen(*args, **kwargs))


class _NoAnswerError(psycopg.OperationalError):
    """The deadline passed before an answer came."""


def _bounded(gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    """Runs a wait of the driver and checks the deadline at each of its steps, at least ten times a second."""
    try:
        _check()
        wanted = next(gen)
        while True:
            ready = yield wanted
            # An answer that has come is taken even at the last moment: it may be that of a COMMIT.
            wanted = gen.send(ready)
            _check()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        gen.close()


def _check() -> None:
    if deadline.is_over():
        raise _NoAnswerError("the database did not answer in time")

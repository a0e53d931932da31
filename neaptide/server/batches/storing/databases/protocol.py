"""Interface of the store's databases: ``sqlite.py`` for a single server, ``postgres.py`` for several."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import sqlalchemy as sa


class OutcomeUnknownError(Exception):
    """A COMMIT failed with ``error``, which does not tell whether it happened.

    ``ask`` answers: True or False for certain, None if it can no longer be known. While the database does not answer,
    ``ask`` raises an error for which ``Database.is_fault`` is true, and may be called again, for up to ``patience_s``.
    """

    def __init__(self, error: Exception, ask: Callable[[], bool | None], patience_s: float) -> None:
        super().__init__(f"it is not known whether the write happened: {getattr(error, 'orig', error)}")
        self.error = error
        self.ask = ask
        self.patience_s = patience_s


class Database(Protocol):
    """A database, opened once. Blocking. ``transaction`` is for the writer's thread, ``reading`` for any thread."""

    @property
    def name(self) -> str:
        """Name for messages; contains no password."""
        ...

    def open(self) -> None:
        """Makes or migrates the tables.

        Raises:
            StoreError: the database cannot be used; the message says why in one line.
        """
        ...

    def close(self) -> None:
        """Closes the database; safe to call twice."""
        ...

    def transaction(self, is_exclusive: bool) -> AbstractContextManager[sa.Connection]:
        """A transaction of the writer, durable when the context ends without an exception.

        ``is_exclusive``: no other server's exclusive transaction runs at the same time. With a single server, all are
        exclusive.

        Raises:
            OutcomeUnknownError: it may or may not have been committed.
        """
        ...

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """A connection that cannot write and sees one state."""
        ...

    def checkpoint(self) -> None:
        """Moves committed data from a log to its place. In the writer's thread, outside of transactions."""
        ...

    @property
    def num_missing_commits(self) -> int:
        """Number of acknowledged commits lost since it was last open, as far as that is known."""
        ...

    def accept_as_it_is(self) -> None:
        """Stops counting those commits as missing, once they have been reported."""
        ...

    def is_fault(self, error: BaseException) -> bool:
        """Whether the database failed for reasons of its own, so that the same call may succeed later."""
        ...

    def is_conflict(self, error: BaseException) -> bool:
        """Whether a transaction was rolled back only because of another one, and should be retried at once."""
        ...

    def missing(self) -> str | None:
        """Why new data would not be found again, if that is detectable; None otherwise. Cheap."""
        ...

    def stored_bytes(self, conn: sa.Connection) -> int:
        """Size of its data outside the data directory."""
        ...

    def reusable_bytes(self, conn: sa.Connection) -> int:
        """Size of the space of deleted records, as far as it is known."""
        ...

    def problems(self, conn: sa.Connection) -> list[str]:
        """Faults that the database finds in itself."""
        ...

    def compact(self) -> None:
        """Returns the space of deleted records to the disk; only while nothing is written."""
        ...

"""What the store needs of a database. ``sqlite.py`` is the one of a single server, ``postgres.py`` the shared one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import sqlalchemy as sa


class OutcomeUnknownError(Exception):
    """A COMMIT failed with ``error``, which does not say whether it happened.

    ``ask`` says so: True or False for good, None where nobody can know any more. It raises what ``Database.is_fault``
    knows as long as the database does not answer, and may then be called again. It is worth ``patience_s``.
    """

    def __init__(self, error: Exception, ask: Callable[[], bool | None], patience_s: float) -> None:
        super().__init__(f"it is not known whether the write happened: {getattr(error, 'orig', error)}")
        self.error = error
        self.ask = ask
        self.patience_s = patience_s


class Database(Protocol):
    """Opened once. Blocking; ``transaction`` for the writer's thread, ``reading`` for any number of threads."""

    @property
    def name(self) -> str:
        """For messages; holds no password."""
        ...

    def open(self) -> None:
        """Makes or migrates the tables.

        Raises:
            StoreError: the database cannot be used; the message says why in one line.
        """
        ...

    def close(self) -> None:
        """Safe to call twice."""
        ...

    def transaction(self, is_exclusive: bool) -> AbstractContextManager[sa.Connection]:
        """A transaction of the writer, durable when the context is left without an exception.

        ``is_exclusive``: no other server's exclusive transaction runs beside it. Where a single server writes, all are.

        Raises:
            OutcomeUnknownError: it may have been committed or not.
        """
        ...

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """A connection that cannot write and sees one state."""
        ...

    def checkpoint(self) -> None:
        """Brings what has been committed from a log to its place. In the writer's thread, outside of transactions."""
        ...

    @property
    def num_missing_commits(self) -> int:
        """How many acknowledged commits it has lost since it was last open, as far as anything tells."""
        ...

    def accept_as_it_is(self) -> None:
        """Those commits have been reported as missing, and are not counted any more."""
        ...

    def is_fault(self, error: BaseException) -> bool:
        """Whether the database did not do what it was asked for reasons of its own; the same may succeed later."""
        ...

    def is_conflict(self, error: BaseException) -> bool:
        """Whether a transaction was undone only since another one was in its way: it is to be run again at once."""
        ...

    def missing(self) -> str | None:
        """Why what is written now would not be found again, where that can be seen; None where it would. Cheap."""
        ...

    def stored_bytes(self, conn: sa.Connection) -> int:
        """Of what lies outside the data directory."""
        ...

    def reusable_bytes(self, conn: sa.Connection) -> int:
        """Of rows that are gone, as far as that is known."""
        ...

    def problems(self, conn: sa.Connection) -> list[str]:
        """What the database finds wrong in itself."""
        ...

    def compact(self) -> None:
        """Gives the space of deleted rows back to the disk; only while nothing is written."""
        ...

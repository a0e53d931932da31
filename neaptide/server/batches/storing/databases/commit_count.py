"""Counts the commits of an SQLite database twice: in the database, and in a file next to it.

The file is written after the commit, so after a crash its count is never the higher one. If it is higher, acknowledged
commits are missing: the write-ahead log was lost or damaged, or an older copy was restored.
"""

import os
from contextlib import suppress
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from neaptide.engine.private_files import private_opener
from neaptide.server.batches.storing.data_dir import COMMITS
from neaptide.server.batches.storing.tables import facts

_FACT = "commits"
_DIGITS = 20


class CommitCount:
    """Counts from one opening of the database to the next. Not thread-safe."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(COMMITS)
        self._fd: int | None = None
        self._in_database = self._in_file = 0

    @property
    def num_missing(self) -> int:
        """Number of acknowledged commits that the database lacks."""
        return max(0, self._in_file - self._in_database)

    def open(self, conn: sa.Connection) -> None:
        """Reads both counts. A missing or unreadable file counts as 0."""
        found = conn.execute(sa.select(facts.c.value).where(facts.c.name == _FACT)).scalar_one_or_none()
        conn.rollback()
        self._in_database = _number(found or "")
        self._fd = private_opener(str(self._path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self._in_file = _number(os.pread(self._fd, _DIGITS, 0).decode("ascii", "replace"))

    def close(self) -> None:
        """Closes the file; safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def accept(self) -> None:
        """Continues counting from the file's number, once missing commits have been reported."""
        self._in_database = max(self._in_database, self._in_file)

    def put(self, conn: sa.Connection) -> int:
        """Counts the transaction in the database; returns its number, for ``note``.

        Counts nothing while missing commits have not been reported, because that would hide them.
        """
        if self.num_missing:
            return self._in_database
        number = self._in_database + 1
        insert = sqlite.insert(facts).values(name=_FACT, value=str(number))
        conn.execute(insert.on_conflict_do_update(index_elements=[facts.c.name], set_={"value": str(number)}))
        return number

    def note(self, number: int) -> None:
        """Writes the number of a durable transaction to the file. If that fails, the file has a lower number, which
        loses a report but no data."""
        self._in_database = number
        if number > self._in_file and self._fd is not None:
            with suppress(OSError):
                os.pwrite(self._fd, f"{number:{_DIGITS}d}\n".encode(), 0)
                self._in_file = number


def _number(text: str) -> int:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else 0

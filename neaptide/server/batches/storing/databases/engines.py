"""What both databases are made of: one connection that writes, a few that only read."""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

NUM_READERS = 4


class TwoEngines:
    """The half of ``Database`` that is the same for each. ``open`` of a subclass makes both engines."""

    def __init__(self) -> None:
        self._write_engine: sa.Engine | None = None
        self._read_engine: sa.Engine | None = None

    def close(self) -> None:
        """As in ``Database``."""
        # Readers first: the last connection to close tidies SQLite's WAL up, and readers may not.
        for engine in (self._read_engine, self._write_engine):
            if engine is not None:
                engine.dispose()
        self._read_engine = self._write_engine = None

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """As in ``Database``."""
        assert self._read_engine is not None
        with self._read_engine.connect() as conn:
            yield conn

    def _writing(self) -> sa.Engine:
        assert self._write_engine is not None
        return self._write_engine

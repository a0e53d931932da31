"""Common parts of both databases: one connection that writes, several that only read."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import sqlalchemy as sa

from neaptide.server.batches.storing.databases.commit_tokens import CommitQuestion, CommitTokens
from neaptide.server.batches.storing.databases.protocol import OutcomeUnknownError

NUM_READERS = 4


class TwoEngines:
    """Common half of the ``Database`` classes. A subclass's ``open`` makes both engines."""

    def __init__(self) -> None:
        self._write_engine: sa.Engine | None = None
        self._read_engine: sa.Engine | None = None
        self._tokens = CommitTokens()

    def close(self) -> None:
        # Readers first: the last connection to close tidies SQLite's WAL, which readers may not do.
        for engine in (self._read_engine, self._write_engine):
            if engine is not None:
                engine.dispose()
        self._read_engine = self._write_engine = None

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        assert self._read_engine is not None
        with self._read_engine.connect() as conn:
            yield conn

    def _commit(self, conn: sa.Connection, transaction: sa.RootTransaction, patience_s: float) -> None:
        """Commits. Raises OutcomeUnknownError unless the database confirms success or failure."""
        token = self._tokens.put(conn)
        try:
            _commit(conn, transaction)
        except sa.exc.DBAPIError as error:
            if self._says_no(error):
                raise
            ask = partial(self._ask, CommitQuestion(self._tokens, token))
            raise OutcomeUnknownError(error, ask, patience_s) from error

    def _says_no(self, error: sa.exc.DBAPIError) -> bool:
        """Whether this error of a COMMIT can only mean that it did not happen."""
        return False

    def _ask(self, question: CommitQuestion) -> bool | None:
        with self._writing().connect() as conn, conn.begin() as transaction:
            answer = question.ask(conn)
            _commit(conn, transaction)
        return answer

    def _writing(self) -> sa.Engine:
        assert self._write_engine is not None
        return self._write_engine


def _commit(conn: sa.Connection, transaction: sa.RootTransaction) -> None:
    try:
        transaction.commit()
    except sa.exc.DBAPIError as error:
        if not error.connection_invalidated:
            # SQLite may have left it open while SQLAlchemy considers it ended, so that no other could begin.
            conn.connection.rollback()
        raise

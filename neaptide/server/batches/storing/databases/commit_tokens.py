"""Finds out whether a COMMIT without an answer happened.

Every writing transaction sets its server's record to a fresh token. A later writing transaction answers the question.
It locks the record, which waits for a COMMIT still in progress, compares the token, and writes its own. Once that token
is durable, so is the answer. A standby that has the second token has the first, and in SQLite's log the second
transaction has overwritten the rest of the first.
"""

import secrets
import time

import sqlalchemy as sa

from neaptide.server.batches.storing.tables import commit_tokens

FORGOTTEN_AFTER_S = 7 * 86_400
"""Age at which records of servers that no longer write are removed at a start. A live server makes a new one."""


class CommitTokens:
    """The record of one server, from one start to the next."""

    def __init__(self) -> None:
        self._server = secrets.token_hex(16)

    def put(self, conn: sa.Connection) -> str:
        """Sets the token of this transaction and returns it; makes the record if there is none."""
        t, now, token = commit_tokens, int(time.time()), secrets.token_hex(16)
        values = {"token": token, "changed_at": now}
        if not conn.execute(t.update().where(t.c.server == self._server).values(**values)).rowcount:
            conn.execute(t.delete().where(t.c.changed_at < now - FORGOTTEN_AFTER_S))
            conn.execute(t.insert().values(server=self._server, **values))
        return token

    def locked(self, conn: sa.Connection) -> str | None:
        """The token of the last committed transaction; None without a record. Waits for a COMMIT in progress."""
        query = sa.select(commit_tokens.c.token).where(commit_tokens.c.server == self._server)
        token: str | None = conn.execute(query.with_for_update()).scalar_one_or_none()
        return token


class CommitQuestion:
    """The question whether one transaction was committed. It can be repeated, as its own COMMIT may get no answer
    either."""

    def __init__(self, tokens: CommitTokens, token: str) -> None:
        self._tokens = tokens
        self._answers = {token: True}
        """Answer for each token: that of the transaction, and those of earlier attempts."""

    def ask(self, conn: sa.Connection) -> bool | None:
        """The answer, once this transaction is durable; None if the database has been replaced by an older one."""
        found = self._tokens.locked(conn)
        if found is None:
            return None
        answer = self._answers.get(found, False)
        self._answers[self._tokens.put(conn)] = answer
        return answer

"""How a server learns whether a COMMIT happened whose answer it never got.

Every writing transaction sets its server's row to a fresh token. Whoever has to know asks in another writing
transaction: it locks the row, which waits for a COMMIT still under way, compares, and writes a token of its own. Once
that one is durable, so is the answer: a standby that has the second token has the first, and in SQLite's log the
second transaction has overwritten what was left of the first.
"""

import secrets
import time

import sqlalchemy as sa

from neaptide.server.batches.storing.tables import commit_tokens

FORGOTTEN_AFTER_S = 7 * 86_400
"""Rows of servers that have not written for so long are removed by the next start. One that lives makes a new one."""


class CommitTokens:
    """The row of one server, from one start to the next."""

    def __init__(self) -> None:
        self._server = secrets.token_hex(16)

    def put(self, conn: sa.Connection) -> str:
        """The token by which this transaction will be known; makes the row where there is none."""
        t, now, token = commit_tokens, int(time.time()), secrets.token_hex(16)
        values = {"token": token, "changed_at": now}
        if not conn.execute(t.update().where(t.c.server == self._server).values(**values)).rowcount:
            conn.execute(t.delete().where(t.c.changed_at < now - FORGOTTEN_AFTER_S))
            conn.execute(t.insert().values(server=self._server, **values))
        return token

    def locked(self, conn: sa.Connection) -> str | None:
        """The token of the last transaction that was committed; waits for one that still may be. None: no row."""
        query = sa.select(commit_tokens.c.token).where(commit_tokens.c.server == self._server)
        token: str | None = conn.execute(query.with_for_update()).scalar_one_or_none()
        return token


class CommitQuestion:
    """Whether one transaction was committed. It may be asked again, for its own COMMIT may be cut off as well."""

    def __init__(self, tokens: CommitTokens, token: str) -> None:
        self._tokens = tokens
        self._answers = {token: True}
        """What it means to find a token: that of the transaction, or one that an earlier try wrote."""

    def ask(self, conn: sa.Connection) -> bool | None:
        """The answer, once this transaction is durable; None where the database has been replaced by an older one."""
        found = self._tokens.locked(conn)
        if found is None:
            return None
        answer = self._answers.get(found, False)
        self._answers[self._tokens.put(conn)] = answer
        return answer

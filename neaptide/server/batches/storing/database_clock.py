"""The clock of the database, so that servers need not agree on the time."""

import sqlalchemy as sa

Milliseconds = int | sa.ColumnElement[int]
"""A time as a number, or the database's own clock."""


def database_now_ms(conn: sa.Connection) -> sa.ColumnElement[int]:
    """The database's own clock, read by the statement itself: its transaction may have begun long before."""
    if conn.dialect.name == "sqlite":
        return sa.cast((sa.func.julianday("now") - 2440587.5) * 86_400_000, sa.BigInteger)
    return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * 1000, sa.BigInteger)

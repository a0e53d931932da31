"""PgBouncer between a server and its database."""

from pathlib import Path

import pytest

from neaptide.cluster.sharing import sharing_of
from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import Store
from tests.cluster.storage.pooler import pgbouncer, url
from tests.postgres import PostgresServer

FILE = FileRecord("file-1", "", "a.jsonl", "batch", 3, "0" * 64, 100, None)


SHARED = r"PgBouncer: pool_mode = transaction.*use pool_mode = session"


@pytest.mark.parametrize(
    ("mode", "round_robin", "message"),
    [("transaction", False, SHARED), ("transaction", True, SHARED), ("statement", False, "statement pooling mode")],
)
def test_a_pooler_whose_sessions_share_connections_is_refused_by_name(
    tmp_path: Path, postgres_server: PostgresServer, mode: str, round_robin: bool, message: str
) -> None:
    database = postgres_server.new_database()
    with pgbouncer(postgres_server, mode, round_robin) as directory:
        with pytest.raises(StoreError, match=message):
            Store(tmp_path / "pooled", sharing_of(url(directory, database))).open()
        # What was tried has left no lock in the pool.
        store = Store(tmp_path / "direct", sharing_of(postgres_server.url(database)))
        store.open()
        store.close()


def test_a_pooler_that_keeps_sessions_apart_serves(
    tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.cluster.storage.postgres.SERVER_LOCK_TIMEOUT_S", 0.1)
    database = postgres_server.new_database()
    with pgbouncer(postgres_server, "session") as directory:
        store = Store(tmp_path / "pooled", sharing_of(url(directory, database)))
        store.open()
        try:
            store.write_blocking(file_rows.insert_file, FILE)
            assert store.read_blocking(file_rows.all_file_ids) == {FILE.id}
            other = Store(tmp_path / "other", sharing_of(url(directory, database)))
            with pytest.raises(StoreError, match="another neaptide server uses it"):
                other.open()
        finally:
            store.close()

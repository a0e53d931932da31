"""The cluster's part of the batch service: PostgreSQL, shared files and the state machine of several servers."""

import sqlalchemy as sa

from neaptide.cluster.batches.state_machine import SharedStateMachine
from neaptide.cluster.lease_order import LEASE_S
from neaptide.cluster.storage.blobs import Blobs
from neaptide.cluster.storage.form import settle_form
from neaptide.server.batches.sharing import BatchSharing
from neaptide.server.batches.storing.databases.protocol import Database
from neaptide.server.batches.wiring import BatchContext


def sharing_of(store_url: str | None, blobs_url: str | None = None, lease_s: float = LEASE_S) -> BatchSharing | None:
    """Storage at these addresses; None without addresses, for a server with all data in its data directory.

    Raises:
        StoreError: an address is invalid.
    """
    return None if store_url is None and blobs_url is None else SharedStorage(store_url, blobs_url, lease_s)


class SharedStorage:
    """Shared storage. Implements ``BatchSharing``.

    Args:
        store_url: address of a PostgreSQL database; None for SQLite in the data directory, for tests.
        blobs_url: address of the storage of files; with it several servers may use the database.
        lease_s: seconds after its last renewal in which a server keeps its leases.

    Raises:
        StoreError: an address is invalid.
    """

    def __init__(self, store_url: str | None, blobs_url: str | None, lease_s: float) -> None:
        self._url: sa.URL | None = None
        if store_url is not None:
            # Imported here: the driver takes as long to load as the rest of the store.
            from neaptide.cluster.storage.postgres import postgres_url

            self._url = postgres_url(store_url)
        self.blobs = None if blobs_url is None else Blobs(blobs_url)
        self._lease_s = lease_s

    def database(self, limit_s: float) -> Database | None:
        """As in ``BatchSharing``."""
        if self._url is None:
            return None
        from neaptide.cluster.storage.postgres import PostgresDatabase

        return PostgresDatabase(self._url, self.blobs is not None, limit_s)

    def settle(self, conn: sa.Connection) -> None:
        """As in ``BatchSharing``."""
        settle_form(conn, self.blobs)

    def machine(self, context: BatchContext) -> SharedStateMachine | None:
        """As in ``BatchSharing``."""
        return None if self.blobs is None else SharedStateMachine(context, self.blobs, self._lease_s)

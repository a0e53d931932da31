"""Decides whether a database belongs to one server, with files in its directory, or to several that share blobs.

The first start decides. From then on the database and the storage know each other's name. Without that, a server with
a wrong address, or with a directory that is not mounted, would take every file for lost.
"""

import secrets

import sqlalchemy as sa

from neaptide.cluster.storage.blobs import Blobs, BlobsUnavailableError
from neaptide.server.batches.storing.data_dir import StoreError
from neaptide.server.batches.storing.models import LIVE
from neaptide.server.batches.storing.tables import batches, facts, files

_BLOBS = "blobs"


def settle_form(conn: sa.Connection, blobs: Blobs | None) -> None:
    """Checks that the database is used in its form, or sets the form of a new one.

    Raises:
        StoreError: it has the other form, the storage belongs to another database, or it does not answer.
    """
    name = conn.execute(sa.select(facts.c.value).where(facts.c.name == _BLOBS)).scalar_one_or_none()
    if blobs is None:
        if name is not None:
            raise StoreError("the database's files are on shared storage; give its address with --blobs")
        return
    try:
        found = blobs.mark()
        if name is not None:
            if found != name:
                raise StoreError(f"{blobs.name} is not the storage of this database")
            return
        if _has_files(conn):
            raise StoreError("the database's files are in a server's data directory; use a new database with --blobs")
        if found is not None:
            raise StoreError(f"{blobs.name} is the storage of another database")
        name = secrets.token_hex(12)
        blobs.set_mark(name)
        conn.execute(facts.insert().values(name=_BLOBS, value=name))
    except BlobsUnavailableError as error:
        raise StoreError(f"the blobs cannot be used: {error}") from error


def _has_files(conn: sa.Connection) -> bool:
    live = sa.exists().where(batches.c.status.in_(LIVE))
    return bool(conn.execute(sa.select(sa.exists().where(files.c.id.is_not(None)) | live)).scalar_one())

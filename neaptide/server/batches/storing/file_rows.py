"""Operations on the ``files`` and ``idempotency_keys`` tables, inside a transaction of the store."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from neaptide.server.batches.storing.models import LIVE, FileRecord, IdempotencyKey, new_file_id
from neaptide.server.batches.storing.tables import batches, deleted_files, files, idempotency_keys

_COLUMNS = [column for column in files.c if column.name != "seq"]


class FileInUseError(Exception):
    """A live batch reads the file."""


class IdempotencyConflictError(Exception):
    """The key was used for a different body."""


def _record(row: sa.Row[Any]) -> FileRecord:
    return FileRecord(**row._mapping)


def _visible(owner: str, now: int) -> sa.ColumnElement[bool]:
    return sa.and_(files.c.owner == owner, sa.or_(files.c.expires_at.is_(None), files.c.expires_at > now))


def insert_file(conn: sa.Connection, record: FileRecord, key: IdempotencyKey | None = None) -> FileRecord:
    """Adds a file, or returns the one that the same key created before.

    Raises:
        IdempotencyConflictError: the key belongs to another body.
    """
    if key is not None:
        known_id = claim_key(conn, key, record.id, record.created_at)
        if known_id != record.id:
            known = get_file(conn, known_id, record.owner, record.created_at)
            if known is not None:
                return known
            move_key(conn, key, record.id)
    conn.execute(files.insert().values(**asdict(record)))
    return record


def get_file(conn: sa.Connection, file_id: str, owner: str, now: int) -> FileRecord | None:
    row = conn.execute(sa.select(*_COLUMNS).where(files.c.id == file_id, _visible(owner, now))).one_or_none()
    return None if row is None else _record(row)


def has_file(conn: sa.Connection, file_id: str) -> bool:
    """Whether the file has a record, of any owner and expired or not."""
    return bool(conn.execute(sa.select(sa.exists().where(files.c.id == file_id))).scalar_one())


def select_purpose(conn: sa.Connection, file_id: str, owner: str) -> tuple[str | None, str | None]:
    """A file's purpose, and the model that it names; None if unknown."""
    query = sa.select(files.c.purpose, files.c.model).where(files.c.id == file_id, files.c.owner == owner)
    row = conn.execute(query).one_or_none()
    return (None, None) if row is None else (row.purpose, row.model)


def list_files(
    conn: sa.Connection, owner: str, now: int, *, purpose: str | None, limit: int, after: str | None, ascending: bool
) -> list[FileRecord] | None:
    """Up to ``limit`` files after the given one; None if ``after`` is and was no file of this owner.

    A recently deleted file still marks its place: a client may delete what it pages through.
    """
    query = sa.select(*_COLUMNS).where(_visible(owner, now)).limit(limit)
    query = query.order_by(files.c.seq.asc() if ascending else files.c.seq.desc())
    if purpose is not None:
        query = query.where(files.c.purpose == purpose)
    if after is not None:
        places = (sa.select(t.c.seq).where(t.c.id == after, t.c.owner == owner) for t in (files, deleted_files))
        seq = conn.execute(sa.union_all(*places)).scalar()
        if seq is None:
            return None
        query = query.where(files.c.seq > seq if ascending else files.c.seq < seq)
    return [_record(row) for row in conn.execute(query)]


def _in_use(file_id: sa.ColumnElement[str] | str) -> sa.Exists:
    return sa.exists().where(batches.c.input_file_id == file_id, batches.c.status.in_(LIVE))


def delete_file(conn: sa.Connection, file_id: str, owner: str, now: int) -> bool:
    """Deletes a file's record; returns False if the owner has no such file.

    Raises:
        FileInUseError: a live batch reads it.
    """
    if get_file(conn, file_id, owner, now) is None:
        return False
    if conn.execute(sa.select(_in_use(file_id))).scalar_one():
        raise FileInUseError(file_id)
    _delete(conn, files.c.id == file_id, now)
    return True


def _delete(conn: sa.Connection, where: sa.ColumnElement[bool], now: int) -> None:
    """Deletes records of files, and notes in the same transaction what is left to remove."""
    gone = sa.select(files.c.id, files.c.owner, files.c.seq, sa.literal(now), sa.false(), files.c.blob).where(where)
    conn.execute(deleted_files.insert().from_select([column.name for column in deleted_files.c], gone))
    conn.execute(files.delete().where(where))


def forget_lost_file(conn: sa.Connection, file_id: str, now: int) -> None:
    """Deletes the record of a file whose bytes are lost, even if it is in use. Results that it was made of stay."""
    _delete(conn, files.c.id == file_id, now)
    mark_swept(conn, file_id)


def delete_expired(conn: sa.Connection, now: int) -> None:
    """Deletes expired files that no live batch reads."""
    _delete(conn, sa.and_(files.c.expires_at <= now, ~_in_use(files.c.id)), now)


def unswept_files(conn: sa.Connection) -> dict[str, str | None]:
    """Deleted files that may have bytes or results left; with the blob of each, if it had one."""
    t = deleted_files.c
    return {row.id: row.blob for row in conn.execute(sa.select(t.id, t.blob).where(~t.is_swept))}


def mark_swept(conn: sa.Connection, file_id: str) -> None:
    conn.execute(deleted_files.update().where(deleted_files.c.id == file_id).values(is_swept=True))


def forget_deleted(conn: sa.Connection, deleted_before: int) -> None:
    """Drops deleted files with nothing left to remove, once clients no longer page from them."""
    t = deleted_files.c
    conn.execute(deleted_files.delete().where(t.is_swept, t.deleted_at < deleted_before))


def all_file_ids(conn: sa.Connection) -> set[str]:
    return set(conn.execute(sa.select(files.c.id)).scalars())


def all_blobs(conn: sa.Connection) -> set[str]:
    """Keys of the files' bytes on shared storage, including those of deleted files."""
    tables = (files, deleted_files)
    keys = sa.union_all(*(sa.select(t.c.blob).where(t.c.blob.is_not(None)) for t in tables))
    return set(conn.execute(keys).scalars())


def all_files(conn: sa.Connection) -> list[FileRecord]:
    """Files of all owners, oldest first."""
    return [_record(row) for row in conn.execute(sa.select(*_COLUMNS).order_by(files.c.seq))]


def claim_key(conn: sa.Connection, key: IdempotencyKey, object_id: str, now: int) -> str:
    """The id of the key's object, which is ``object_id`` if the key is new.

    Raises:
        IdempotencyConflictError: the key belongs to another body.
    """
    t = idempotency_keys
    where = (t.c.owner == key.owner, t.c.kind == key.kind, t.c.key == key.key)
    row = conn.execute(sa.select(t.c.body_hash, t.c.object_id).where(*where)).one_or_none()
    if row is None:
        conn.execute(t.insert().values(**asdict(key), object_id=object_id, created_at=now))
        return object_id
    if row.body_hash != key.body_hash:
        raise IdempotencyConflictError(key.key)
    return str(row.object_id)


def is_claimed(conn: sa.Connection, key: IdempotencyKey) -> bool:
    """Whether the key has an object, whatever its body."""
    t = idempotency_keys
    where = (t.c.owner == key.owner, t.c.kind == key.kind, t.c.key == key.key)
    return conn.execute(sa.select(t.c.object_id).where(*where)).one_or_none() is not None


def move_key(conn: sa.Connection, key: IdempotencyKey, object_id: str) -> None:
    """Points a key to a new object after its old one has been deleted."""
    t = idempotency_keys
    where = (t.c.owner == key.owner, t.c.kind == key.kind, t.c.key == key.key)
    conn.execute(t.update().where(*where).values(object_id=object_id))


def delete_old_keys(conn: sa.Connection, created_before: int) -> None:
    conn.execute(idempotency_keys.delete().where(idempotency_keys.c.created_at < created_before))


def insert_output_files(conn: sa.Connection, records: Sequence[FileRecord]) -> None:
    for record in records:
        conn.execute(files.insert().values(**asdict(record)))


def result_names() -> dict[str, str]:
    """New ids for the result files of a batch. They are chosen whenever the files' contents change. So an id that was
    shown never means other contents, even after an older copy of the database or of everything was restored."""
    return {"planned_output_file_id": new_file_id(), "planned_error_file_id": new_file_id()}


def name_results(conn: sa.Connection, batch_id: str) -> None:
    """Chooses new ids for the result files of a batch."""
    conn.execute(batches.update().where(batches.c.id == batch_id).values(**result_names()))


def planned_file_ids(conn: sa.Connection) -> set[str]:
    """Planned ids of the result files of live batches."""
    query = sa.select(batches.c.planned_output_file_id, batches.c.planned_error_file_id)
    return {file_id for row in conn.execute(query.where(batches.c.status.in_(LIVE))) for file_id in row}

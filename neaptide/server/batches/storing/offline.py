"""Operations of ``neaptide data`` on a data directory while no server uses it. Blocking."""

import asyncio
import hashlib
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa

from neaptide.durations import DAY_S
from neaptide.server.batches.storing import batch_rows, file_rows, retention_rows
from neaptide.server.batches.storing.data_dir import (
    CACHE,
    DATABASE_NAME,
    FILES,
    JOBS,
    MOVED_ASIDE,
    PROFILES,
    REQUEST_LOG,
)
from neaptide.server.batches.storing.files import FileStore
from neaptide.server.batches.storing.housekeeping import IDEMPOTENCY_KEY_LIFE_S, Housekeeping
from neaptide.server.batches.storing.leftovers import judges, missing_commits
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import Store
from neaptide.server.batches.storing.tables import batch_lines, batches, files

_PAGE_LINES = 1_000
LEFTOVER_BLOB_S = DAY_S
"""Age below which a blob without a record may be one whose record is about to be written."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the parts of a data directory."""

    bytes_of: dict[str, int]
    """Bytes of each part of the directory."""
    reusable_bytes: int
    """Bytes of deleted records in the database; new records reuse them, and ``prune`` returns them to the disk."""
    rows_of: dict[str, int]
    """Number of records of each table."""


@dataclass(slots=True)
class Findings:
    """Counts and faults found by ``check``."""

    files: int = 0
    results: int = 0
    repairs: list[str] = field(default_factory=list)
    """Files that were restored or dropped before."""
    problems: list[str] = field(default_factory=list)


def sizes(store: Store) -> Sizes:
    """Sizes of the directory's parts in bytes, and of the tables in records."""
    found = Counter(dict.fromkeys(("database", FILES, JOBS, CACHE, "logs", PROFILES, MOVED_ASIDE, "other"), 0))
    for path in store.data_dir.iterdir():
        found[_part(path.name)] += sum(_bytes(below) for below in (path, *path.rglob("*")))
    found["database"] += store.read_blocking(store.database.stored_bytes)
    if store.blobs is not None:
        found["blobs"] = sum(blob.num_bytes for blob in store.blobs.find())
    return Sizes(dict(found), store.read_blocking(store.database.reusable_bytes), store.read_blocking(_rows))


def _part(name: str) -> str:
    if name.startswith(DATABASE_NAME):
        return "database"
    if name.startswith(REQUEST_LOG):
        return "logs"
    return name if name in (FILES, JOBS, CACHE, PROFILES, MOVED_ASIDE) else "other"


def _bytes(path: Path) -> int:
    return path.lstat().st_size if path.is_file() and not path.is_symlink() else 0


def _rows(conn: sa.Connection) -> dict[str, int]:
    return {
        table.name: conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
        for table in (files, batches, batch_lines)
    }


def check(store: Store) -> Findings:
    """Checks everything: the database's consistency, the files' hashes, the results' checksums, and unknown entries."""
    found = Findings()
    found.problems += missing_commits(store)
    found.problems += [f"database: {text}" for text in store.read_blocking(store.database.problems)]
    for record in store.read_blocking(file_rows.all_files):
        found.files += 1
        if (fault := fault_of(store, record)) is not None:
            found.problems.append(f"{fault.name}: {fault.text}")
    for batch_id in sorted(store.read_blocking(batch_rows.all_batch_ids)):
        _check_results(store, batch_id, found)
    for folder, verdict in judges(store).items():
        for path in sorted((store.data_dir / folder).iterdir()):
            if verdict(path.name) is None:
                found.problems.append(f"{folder}/{path.name}: unknown to the database; a start moves it aside")
    found.problems += [f"{key}: no record has this blob; prune moves it aside" for key in leftover_blobs(store)]
    return found


class FileFault(NamedTuple):
    """A fault of a file that the database knows."""

    name: str
    text: str
    is_final: bool
    """Whether its bytes are lost or wrong; otherwise they only cannot be read now."""
    is_missing: bool = False


def fault_of(store: Store, record: FileRecord) -> FileFault | None:
    """The file's fault, or None. Reads the whole file."""
    name = f"{store.files_dir.name}/{record.id}" if record.blob is None else record.blob
    try:
        num_bytes, digest = _read(store, record)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        return FileFault(name, error.strerror or str(error), is_missing, is_missing)
    if (num_bytes, digest) == (record.num_bytes, record.sha256):
        return None
    return FileFault(name, "its bytes differ from the stored ones", True)


def _read(store: Store, record: FileRecord) -> tuple[int, str]:
    """Size and SHA-256 of a file; with shared storage, of the blob and not of a copy."""
    path, fetched = store.files_dir / record.id, None
    if store.blobs is not None and record.blob is not None:
        path = fetched = store.files_dir / f"{record.id}.tmp"
        store.blobs.fetch(record.blob, path, store.files_dir)
    try:
        with path.open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
            return f.tell(), digest
    finally:
        if fetched is not None:
            fetched.unlink()


def leftover_blobs(store: Store) -> list[str]:
    """Keys without a record that are too old to be part of a running write. Blocking.

    Crashes have left them, or an older copy of the database does not know them.
    """
    if store.blobs is None:
        return []
    written_before_s = time.time() - LEFTOVER_BLOB_S
    # Listed first, so that blobs that get their record meanwhile are not included.
    old = [blob.key for blob in store.blobs.find() if blob.written_s < written_before_s]
    files_of, plans_of = store.read_blocking(file_rows.all_blobs), store.read_blocking(batch_rows.live_plan_blobs)
    unknown = (key for key in old if key not in files_of and key.rpartition(".")[0] not in plans_of)
    return sorted(key for key in unknown if not key.startswith(f"{MOVED_ASIDE}/"))


def _check_results(store: Store, batch_id: str, found: Findings) -> None:
    after = 0
    while page := store.read_blocking(batch_rows.ended_lines, batch_id, after, _PAGE_LINES):
        found.results += sum(line.result is not None for line in page)
        found.problems += [
            f"{batch_id}, line {line.line_no}: its stored result is damaged" for line in page if line.is_damaged
        ]
        after = page[-1].line_no


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Data to remove in addition to what a server removes itself."""

    moved_aside: bool = False
    batches_older_than_days: float | None = None
    """Age of ended batches to remove; those with a result file stay."""

    def __post_init__(self) -> None:
        days = self.batches_older_than_days
        if days is not None and not days * DAY_S >= IDEMPOTENCY_KEY_LIFE_S:
            least = IDEMPOTENCY_KEY_LIFE_S // DAY_S
            raise ValueError(
                f"batches can be forgotten after {least} days: until then a client may repeat the creation"
            )


def prune(store: Store, what: Prune) -> int:
    """Removes what is due and returns the space to the disk; returns the number of bytes."""
    before = sum(sizes(store).bytes_of.values())
    files_of_store = FileStore(store, time.time, max_file_bytes=0)
    asyncio.run(Housekeeping(store, files_of_store, time.time).run())
    if what.batches_older_than_days is not None:
        ended_before = int(time.time() - what.batches_older_than_days * DAY_S)
        store.write_blocking(retention_rows.forget_batches, ended_before)
    if what.moved_aside:
        _remove_moved_aside(store)
    stamp = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    for key in leftover_blobs(store):
        assert store.blobs is not None
        store.blobs.set_aside(key, stamp)
    store.compact()
    return before - sum(sizes(store).bytes_of.values())


def _remove_moved_aside(store: Store) -> None:
    aside = store.data_dir / MOVED_ASIDE
    if aside.exists():
        shutil.rmtree(aside)
    if store.blobs is not None:
        for key in [blob.key for blob in store.blobs.find() if blob.key.startswith(f"{MOVED_ASIDE}/")]:
            store.blobs.remove(key)

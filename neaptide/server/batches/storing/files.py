"""Files on disk and their records: a file exists if its record does, which is written last.

 upload   temp file -> fsync -> rename -> fsync directory -> record
 delete   record -> unlink

On shared storage, the bytes are stored there before the record, and the directory has copies.

A crash leaves at most bytes without a record, which ``leftovers.tidy`` handles at the next start. While it is not known
whether a record was written, the bytes stay.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from neaptide.durations import DAY_S
from neaptide.engine.private_files import private_opener
from neaptide.server.batches.served import named_model
from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.data_dir import sync_directory
from neaptide.server.batches.storing.faults import (
    FileAwayError,
    FileDamagedError,
    StorageHealth,
    no_such_file,
)
from neaptide.server.batches.storing.file_rows import FileInUseError, IdempotencyConflictError
from neaptide.server.batches.storing.models import FileRecord, IdempotencyKey, new_file_id
from neaptide.server.batches.storing.store import Store, StoreUnavailableError, WriteUnknownError
from neaptide.server.http.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
)

logger = logging.getLogger(__name__)

PURPOSES = ("batch", "user_data")
MAX_FILENAME_CHARS = 255
DEFAULT_LIFE_S = 30 * DAY_S
MIN_EXPIRY_S, MAX_EXPIRY_S = 3_600, 30 * DAY_S
STALE_COPY_S = 3_600
"""A younger copy may be of a file whose record is not written yet."""
FILES_A_LOOK = 16
"""Number of unreadable files that are checked at a time."""
_FLUSH_BYTES = 1 << 20
_TEMP_SUFFIX = ".tmp"
MAX_FIRST_LINE_BYTES = 1 << 20
"""The checking process reads longer lines."""


@dataclass(frozen=True, slots=True)
class UploadForm:
    """Fields of an upload other than its bytes."""

    filename: str
    purpose: str
    expires_after_s: int | None = None


class Upload:
    """Receives the bytes of one file. Leaving the context without ``commit`` leaves no trace.

    Raises:
        PayloadTooLargeError: from ``write``, beyond ``max_bytes``.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._path = directory / f"upload-{secrets.token_hex(8)}{_TEMP_SUFFIX}"
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._file: FileIO | None = None
        self._is_left = False
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    async def __aenter__(self) -> "Upload":
        try:
            await asyncio.to_thread(self._open)
        except asyncio.CancelledError:
            # The thread removes a file that it opens after this.
            self._is_left = True
            self._remove()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        # Not awaited in a thread, because a cancelled request must also clean up.
        self._remove()

    async def write(self, data: bytes | memoryview) -> None:
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise PayloadTooLargeError(f"The file is larger than {self._max_bytes} bytes.")
        self._buffer += data
        if len(self._buffer) >= _FLUSH_BYTES:
            await self._flush()

    async def finish(self) -> str:
        """Makes the bytes durable under their temporary name; returns their SHA-256."""
        await self._flush()
        await asyncio.to_thread(self._close_durably)
        return self._hash.hexdigest()

    def named_model(self) -> str | None:
        """The model that the first line of a batch names, if the line is short; after ``finish``."""
        with self._path.open("rb") as f:
            return named_model(f.readline(MAX_FIRST_LINE_BYTES))

    def rename(self, target: Path) -> None:
        self._path.rename(target)
        sync_directory(target.parent)

    def _open(self) -> None:
        self._file = FileIO(self._path, "x", opener=private_opener)
        if self._is_left:
            self._remove()

    def _remove(self) -> None:
        with suppress(OSError):  # The next start removes a file that a failing storage does not delete.
            if self._file is not None:
                self._file.close()
            self._path.unlink(missing_ok=True)

    async def _flush(self) -> None:
        data, self._buffer = self._buffer, bytearray()
        await asyncio.to_thread(self._append, data)

    def _append(self, data: bytearray) -> None:
        assert self._file is not None
        self._hash.update(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _close_durably(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None


class FileStore:
    """The files API without HTTP. Methods raise ``ApiError``s for the routes."""

    def __init__(
        self, store: Store, now: Callable[[], float], max_file_bytes: int, life_s: int = DEFAULT_LIFE_S
    ) -> None:
        self._store = store
        self._now = now
        self._life_s = life_s
        self.max_file_bytes = max_file_bytes
        self.directory = store.files_dir
        self._blobs = store.blobs
        self.health = StorageHealth()
        self._seen: dict[str, tuple[tuple[int, ...], bool]] = {}
        """Version of each file that has been compared with its hash, and whether it matched."""
        self._undecided: dict[str, str | None] = {}
        """Uploads whose records may or may not exist, with their blobs."""

    def path(self, file_id: str) -> Path:
        return self.directory / file_id

    def upload(self) -> Upload:
        return Upload(self.directory, self.max_file_bytes)

    async def commit(
        self, upload: Upload, form: UploadForm, owner: str, idempotency_key: str | None = None
    ) -> FileRecord:
        """Makes an upload a file.

        Raises:
            InvalidRequestError: purpose, name or expiry are invalid.
            ConflictError: the idempotency key was used for other content.
            WriteUnknownError: the file is stored completely or not at all.
        """
        check_form(form)
        digest = await upload.finish()
        now = int(self._now())
        expires_after_s = form.expires_after_s
        if expires_after_s is None and form.purpose == "batch":
            expires_after_s = self._life_s
        file_id = new_file_id()
        record = FileRecord(
            id=file_id,
            owner=owner,
            filename=form.filename,
            purpose=form.purpose,
            num_bytes=upload.num_bytes,
            sha256=digest,
            created_at=now,
            expires_at=None if expires_after_s is None else now + expires_after_s,
            blob=None if self._blobs is None else self._blobs.upload_key(file_id),
            model=await asyncio.to_thread(upload.named_model) if form.purpose == "batch" else None,
        )
        key = None
        if idempotency_key is not None:
            body = f"{form.purpose}\0{form.filename}\0{form.expires_after_s}\0{digest}"
            key = IdempotencyKey(owner, "files", idempotency_key, hashlib.sha256(body.encode()).hexdigest())
        is_put = False
        try:
            await asyncio.to_thread(upload.rename, self.path(record.id))
            await self._put(record)
            is_put = True
            kept = await self._store.write(file_rows.insert_file, record, key)
        except WriteUnknownError:
            self._undecided[record.id] = record.blob
            raise
        except Exception as error:
            # Not for a cancelled request, whose record may exist; the next start decides about that one.
            await self.remove(record.id, record.blob if is_put else None)
            if isinstance(error, IdempotencyConflictError):
                raise ConflictError(
                    "The Idempotency-Key was used for a different upload.", code="idempotency_key_reused"
                ) from None
            raise
        if kept.id != record.id:
            await self.remove(record.id, record.blob)
        return kept

    async def settle(self) -> None:
        """Removes the bytes of uploads whose write was unknown and turned out not to have happened.

        Raises:
            StoreUnavailableError: a temporary failure.
        """
        for file_id, blob in list(self._undecided.items()):
            # Asked in a write: once it has happened, no earlier unfinished write can happen any more.
            if await self._store.write(file_rows.has_file, file_id) or await self.remove(file_id, blob):
                del self._undecided[file_id]

    async def _put(self, record: FileRecord) -> None:
        if self._blobs is not None and record.blob is not None:
            await self._blobs.in_thread(self._blobs.put, self.path(record.id), record.blob)

    async def get(self, file_id: str, owner: str) -> FileRecord:
        """The owner's file. Raises NotFoundError for unknown, expired and other owners' files alike."""
        record = await self._store.read(file_rows.get_file, file_id, owner, int(self._now()))
        if record is None:
            raise no_such_file()
        return record

    async def list_page(
        self, owner: str, *, purpose: str | None, limit: int, after: str | None, ascending: bool
    ) -> tuple[list[FileRecord], bool]:
        """A page of files and whether more follow."""
        found = await self._store.read(
            file_rows.list_files,
            owner,
            int(self._now()),
            purpose=purpose,
            limit=limit + 1,
            after=after,
            ascending=ascending,
        )
        if found is None:
            raise InvalidRequestError("No file has the id given in 'after'.", param="after", code="invalid_value")
        return found[:limit], len(found) > limit

    async def delete(self, file_id: str, owner: str) -> None:
        """Deletes a file. Raises NotFoundError, or ConflictError while a live batch reads the file."""
        record = await self.get(file_id, owner)
        try:
            deleted = await self._store.write(file_rows.delete_file, file_id, owner, int(self._now()))
        except FileInUseError:
            raise ConflictError("The file is in use by a batch that has not ended.", code="file_in_use") from None
        if not deleted:
            raise no_such_file()
        await self.remove(file_id, record.blob)

    async def remove(self, file_id: str, blob: str | None = None) -> bool:
        """Removes the bytes of a file without a record; returns False if the disk refuses, and housekeeping tries
        again."""
        self._seen.pop(file_id, None)
        self.health.forget(file_id)
        try:
            await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)
            if self._blobs is not None and blob is not None:
                await self._blobs.in_thread(self._blobs.remove, blob)
        except OSError as error:
            logger.error("cannot remove %s: %s", file_id, error.strerror or error)
            return False
        return True

    async def verify(self, record: FileRecord) -> None:
        """Checks the file like ``open``, for callers that read it later."""
        (await self.open(record)).close()

    async def open(self, record: FileRecord) -> BinaryIO:
        """The bytes of a file with a record, compared with their hash once for each version on disk.

        Raises:
            NotFoundError: the record has been deleted.
            FileAwayError: it has a record, so the bytes may return.
            StoreUnavailableError: the database cannot be asked.
        """
        try:
            file = await self._open_or_fetch(record)
        except OSError as error:
            if not await self._store.read(file_rows.has_file, record.id):
                self.health.forget(record.id)
                raise no_such_file() from None
            raise self.health.note_away(record, error) from error
        self.health.note_back(record.id)
        return file

    async def _open_or_fetch(self, record: FileRecord) -> BinaryIO:
        try:
            return await self._open_in_thread(record)
        except OSError:
            if self._blobs is None or record.blob is None:
                raise
        # There is no copy, or a damaged one.
        await self._blobs.in_thread(self._blobs.fetch, record.blob, self.path(record.id), self.directory)
        return await self._open_in_thread(record)

    async def _open_in_thread(self, record: FileRecord) -> BinaryIO:
        opening = asyncio.get_running_loop().run_in_executor(None, self.open_here, record)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unread)
            raise

    def open_here(self, record: FileRecord) -> BinaryIO:
        """The bytes in this server's directory, compared with their hash. Blocking.

        Raises:
            FileDamagedError: they are damaged.
            OSError: they cannot be read.
        """
        file = self.path(record.id).open("rb")
        try:
            found = os.fstat(file.fileno())
            version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if self._seen.get(record.id, (None, False))[0] != version:
                is_sound = hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
                self._seen[record.id] = version, is_sound
                file.seek(0)
            if not self._seen[record.id][1]:
                raise FileDamagedError(record.id)
        except BaseException:
            file.close()
            raise
        return file

    # ---- the storage's health ----

    async def look_again(self) -> None:
        """Retries what the storage has refused: a few of the unreadable files, and a write."""
        for record in list(self.health.away.values())[:FILES_A_LOOK]:
            # The next time, other files are checked first.
            self.health.away[record.id] = self.health.away.pop(record.id)
            with suppress(NotFoundError, FileAwayError, StoreUnavailableError):
                await self.verify(record)
        # What covers a missing directory is not ours to write to.
        if self.health.refuses_writes and self.health.missing is None:
            with suppress(OSError):
                await self._try_to_write()
                self.health.refuses_writes = False

    async def _try_to_write(self) -> None:
        async with self.upload() as upload:
            await upload.write(bytes(min(_FLUSH_BYTES, self.max_file_bytes)))
            await upload.finish()
        if self._blobs is not None:
            await self._blobs.in_thread(self._blobs.mark)

    def drop_stale_copies(self, known: Collection[str]) -> None:
        """Removes copies of files that are deleted, even on other servers. Blocking."""
        if self._blobs is None:
            return
        # The machine's own clock, like the copies' times.
        changed_before_s = time.time() - STALE_COPY_S
        for path in self.directory.iterdir():
            if path.name not in known and path.stat().st_mtime < changed_before_s:
                path.unlink(missing_ok=True)


def _close_unread(opening: "asyncio.Future[BinaryIO]") -> None:
    """Closes the file if its caller was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def check_form(form: UploadForm) -> None:
    """Raises InvalidRequestError for an invalid purpose, name or expiry."""
    if form.purpose not in PURPOSES:
        raise InvalidRequestError(
            f"Invalid value for 'purpose': supported values are {', '.join(PURPOSES)}.",
            param="purpose",
            code="invalid_value",
        )
    name = form.filename
    if not name:
        message = "The file has no name; with curl: -F file=@PATH."
        raise InvalidRequestError(message, param="file", code="invalid_value")
    if len(name) > MAX_FILENAME_CHARS:
        message = f"The file name has {len(name)} characters; at most {MAX_FILENAME_CHARS} are possible."
        raise InvalidRequestError(message, param="file", code="invalid_value")
    if any(ord(c) < 32 or 0xD800 <= ord(c) <= 0xDFFF for c in name):
        raise InvalidRequestError("The file name has control characters.", param="file", code="invalid_value")
    if form.purpose == "batch" and not name.lower().endswith(".jsonl"):
        message = "Invalid file format for Batch API. The file's name must end with .jsonl"
        raise InvalidRequestError(message, param="file", code="invalid_value")
    seconds = form.expires_after_s
    if seconds is not None and not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise InvalidRequestError(
            f"Invalid value for 'expires_after[seconds]': between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}.",
            param="expires_after[seconds]",
            code="invalid_value",
        )

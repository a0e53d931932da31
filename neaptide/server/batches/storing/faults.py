"""Meaning of missing files and database failures, and the replies to callers; the one place that decides.

 no record of the file   deleted: 404, and a batch that needs it can never run
 a record of the file    missing: 503, or 507 without space, and ``neaptide_storage_failing`` is 1; no line ends for
                         it, and waiting work continues when it returns

So no error number means that a file is deleted: a volume that is not mounted gives ENOENT, too. A file of the database
counts as missing until ``neaptide data check --repair`` drops its record. Damaged bytes count as missing: a backup may
have the right ones.
"""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import StoreUnavailableError, WriteUnknownError
from neaptide.server.http.errors import ApiError, NotFoundError, UnavailableError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 60
"""Housekeeping removes expired files once a minute."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileAwayError(OSError):
    """The database knows the file, and the storage cannot read it now. It may return."""


class FileDamagedError(FileAwayError):
    """The stored bytes are damaged; none of them are served or used."""

    def __init__(self, file_id: str) -> None:
        super().__init__(errno.EIO, "the bytes differ from the stored ones", file_id)


class StorageFullError(ApiError):
    """507: nothing was stored. The SDK may retry, as space returns when files are deleted or expire."""

    status = 507
    code = "insufficient_storage"
    is_passing = True

    def __init__(self) -> None:
        super().__init__("The server has no space left for files.", headers={"Retry-After": str(RETRY_AFTER_S)})


class StorageHealth:
    """Current faults of the file storage. ``FileStore.look_again`` checks them again."""

    def __init__(self) -> None:
        self.away: dict[str, FileRecord] = {}
        """Files that could not be read, by id."""
        self.refuses_writes = False
        self.missing: str | None = None
        """Why the data directory is not the one that was opened; None if it is."""

    @property
    def is_failing(self) -> bool:
        return bool(self.away) or self.refuses_writes or self.missing is not None

    def note_away(self, record: FileRecord, error: OSError) -> FileAwayError:
        """Notes that a file cannot be read; returns the error for callers."""
        if record.id not in self.away:
            logger.error("%s cannot be read: %s", record.id, error)
        self.away[record.id] = record
        if isinstance(error, FileAwayError):
            return error
        return FileAwayError(error.errno or errno.EIO, error.strerror or str(error), record.id)

    def note_back(self, file_id: str) -> None:
        """Notes that the file could be read."""
        if self.away.pop(file_id, None) is not None:
            logger.info("%s can be read again", file_id)

    def forget(self, file_id: str) -> None:
        """Forgets a file whose record is deleted."""
        self.away.pop(file_id, None)

    def note(self, error: OSError) -> None:
        """Notes a write that the storage refused."""
        if not self.refuses_writes:
            logger.error("files cannot be stored: %s", error)
        self.refuses_writes = True

    def note_missing(self, missing: str | None) -> None:
        """Notes whether the data directory is the one that was opened."""
        if missing is not None and self.missing is None:
            logger.error("%s; nothing is stored until it returns", missing)
        elif missing is None and self.missing is not None:
            logger.info("the data directory is back")
        self.missing = missing


@contextmanager
def storage_faults(health: StorageHealth) -> Iterator[None]:
    """Turns failures of disk and database into replies, and notes them.

    Nothing was committed, except perhaps with the 503 of a write whose COMMIT got no answer: that write is stored
    completely or not at all.
    """
    try:
        yield
    except (OSError, StoreUnavailableError) as error:
        if isinstance(error, OSError) and not isinstance(error, FileAwayError):
            health.note(error)
        raise reply_to(error) from None


def reply_to(error: OSError | StoreUnavailableError) -> ApiError:
    """The reply to a caller for a failure of the storage."""
    if isinstance(error, WriteUnknownError):
        text = "It is not known whether this was stored. Check, or send it again with the same Idempotency-Key."
        return UnavailableError(text, code="storage_unavailable")
    if isinstance(error, FileDamagedError):
        return ApiError("The file is damaged on the server's disk.", param="id", code="file_damaged")
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return StorageFullError()
    return UnavailableError("The server's storage is not available right now.", code="storage_unavailable")


def no_such_file() -> NotFoundError:
    """The error for a file without a record: unknown, deleted, expired, or another owner's."""
    return NotFoundError("No file has this id.", param="id")

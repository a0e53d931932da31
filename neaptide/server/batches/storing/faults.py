"""What it means that a file or the database cannot be had, and what a caller is told: decided here, for all.

    no row names the file   gone: 404, and a batch that needs it can never run
    a row names it          away: 503, or 507 without space, and ``neaptide_storage_failing`` is 1; no line ends for
                            it, and what waits goes on when it is back

So no error number says that a file is gone: a volume that is not mounted is ENOENT, too. What the database knows is
away until ``neaptide data check --repair`` drops the row. Bytes that are not those that were stored count as away: a
backup may hold the right ones.
"""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import StoreUnavailableError, WriteUnknownError
from neaptide.server.edge.errors import ApiError, NotFoundError, UnavailableError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 60
"""Housekeeping looks once a minute for files that have expired."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileAwayError(OSError):
    """The database knows the file, and the storage does not give it now. It may be back later."""


class FileDamagedError(FileAwayError):
    """What lies on the storage is not what was stored; nothing of it is served or run."""

    def __init__(self, file_id: str) -> None:
        super().__init__(errno.EIO, "the bytes are not those that were stored", file_id)


class StorageFullError(ApiError):
    """507: nothing was kept. The SDK may try again; space comes back when files are deleted or expire."""

    status = 507
    code = "insufficient_storage"
    is_passing = True

    def __init__(self) -> None:
        super().__init__("The server has no space left for files.", headers={"Retry-After": str(RETRY_AFTER_S)})


class StorageHealth:
    """What the storage refused last, and has not done since. ``FileStore.look_again`` asks for it again."""

    def __init__(self) -> None:
        self.away: dict[str, FileRecord] = {}
        """Files that could not be had, by id."""
        self.refuses_writes = False
        self.missing: str | None = None
        """Why the data directory is not the one that was opened; None where it is."""

    @property
    def is_failing(self) -> bool:
        return bool(self.away) or self.refuses_writes or self.missing is not None

    def note_away(self, record: FileRecord, error: OSError) -> FileAwayError:
        """The error for callers of a file that cannot be had."""
        if record.id not in self.away:
            logger.error("%s is away: %s", record.id, error)
        self.away[record.id] = record
        if isinstance(error, FileAwayError):
            return error
        return FileAwayError(error.errno or errno.EIO, error.strerror or str(error), record.id)

    def note_back(self, file_id: str) -> None:
        """It could be read."""
        if self.away.pop(file_id, None) is not None:
            logger.info("%s is back", file_id)

    def forget(self, file_id: str) -> None:
        """Its row is gone."""
        self.away.pop(file_id, None)

    def note(self, error: OSError) -> None:
        """A write that the storage refused."""
        if not self.refuses_writes:
            logger.error("the storage refuses files: %s", error)
        self.refuses_writes = True

    def note_missing(self, missing: str | None) -> None:
        """Whether the data directory is the one that was opened."""
        if missing is not None and self.missing is None:
            logger.error("%s; nothing is stored until it is back", missing)
        elif missing is None and self.missing is not None:
            logger.info("the data directory is back")
        self.missing = missing


@contextmanager
def storage_faults(health: StorageHealth) -> Iterator[None]:
    """Turns failures of disk and database into replies, and notes them.

    Nothing was committed when one of them is sent, but for the 503 of a write whose COMMIT was cut off: what that one
    wrote is there whole or not at all.
    """
    try:
        yield
    except (OSError, StoreUnavailableError) as error:
        if isinstance(error, OSError) and not isinstance(error, FileAwayError):
            health.note(error)
        raise reply_to(error) from None


def reply_to(error: OSError | StoreUnavailableError) -> ApiError:
    """What a caller is told of a storage that does not do what it is asked."""
    if isinstance(error, WriteUnknownError):
        text = "The database did not say whether this was stored. Look, or send it again with the same Idempotency-Key."
        return UnavailableError(text, code="storage_unavailable")
    if isinstance(error, FileDamagedError):
        return ApiError("The file is damaged on the server's disk.", param="id", code="file_damaged")
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return StorageFullError()
    return UnavailableError("The server's storage is not available right now.", code="storage_unavailable")


def no_such_file() -> NotFoundError:
    """For a file that no row names: unknown, deleted, expired, or another owner's."""
    return NotFoundError("No file has this id.", param="id")

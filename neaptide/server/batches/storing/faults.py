"""What a caller is told when the disk does not play along."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from neaptide.server.batches.storing.shared.blobs import BlobsUnavailableError
from neaptide.server.batches.storing.store import StoreUnavailableError, WriteUnknownError
from neaptide.server.edge.errors import ApiError, UnavailableError

RETRY_AFTER_S = 60
"""Housekeeping looks once a minute for files that have expired."""


class StorageFullError(ApiError):
    """507: nothing was kept. The SDK may try again; space comes back when files are deleted or expire."""

    status = 507
    code = "insufficient_storage"
    is_passing = True

    def __init__(self) -> None:
        super().__init__("The server has no space left for files.", headers={"Retry-After": str(RETRY_AFTER_S)})


@contextmanager
def storage_faults() -> Iterator[None]:
    """Turns failures of disk and database into replies.

    Nothing was committed when one of them is sent, but for the 503 of a write whose COMMIT was cut off: what that one
    wrote is there whole or not at all.
    """
    try:
        yield
    except WriteUnknownError:
        raise UnavailableError(
            "The database did not say whether this was stored. Look, or send it again with the same Idempotency-Key.",
            code="storage_unavailable",
        ) from None
    except (StoreUnavailableError, BlobsUnavailableError):
        raise UnavailableError("The server cannot store data right now.", code="storage_unavailable") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError from None
        if error.errno == errno.EIO:
            raise UnavailableError("The server cannot store data right now.", code="storage_unavailable") from None
        raise

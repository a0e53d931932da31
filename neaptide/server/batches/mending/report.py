"""Reports faults that a start finds and cannot repair, one log line each."""

import logging
import os

from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.data_dir import FILES
from neaptide.server.batches.storing.leftovers import missing_commits
from neaptide.server.batches.storing.models import FileRecord
from neaptide.server.batches.storing.store import Store

logger = logging.getLogger(__name__)

MAX_LINES = 50


def report(store: Store, now_s: float) -> None:
    """Logs the faults and continues. Blocking; at start only, after ``leftovers.tidy``."""
    found = wrong_at_start(store, now_s)
    for text in found[:MAX_LINES]:
        logger.warning(text)
    if len(found) > MAX_LINES:
        logger.warning("%d more faults: neaptide data check lists all of them", len(found) - MAX_LINES)
    store.database.accept_as_it_is()


def wrong_at_start(store: Store, now_s: float) -> list[str]:
    """Faults that show without reading any file. With shared storage, files are not checked."""
    found = missing_commits(store)
    if store.blobs is None:
        with os.scandir(store.files_dir) as entries:
            sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
        found += _wrong_files(store, sizes, now_s)
    return found


def _wrong_files(store: Store, sizes: dict[str, int], now_s: float) -> list[str]:
    known = store.read_blocking(file_rows.all_files)
    return [
        f"{FILES}/{record.id}: {_fault(record, sizes)}; put it back, or drop it with neaptide data check --repair"
        for record in known
        if sizes.get(record.id) != record.num_bytes and not (record.expires_at and record.expires_at <= now_s)
    ]


def _fault(record: FileRecord, sizes: dict[str, int]) -> str:
    size = sizes.get(record.id)
    return "it is missing" if size is None else f"it has {size} bytes, and {record.num_bytes} were stored"

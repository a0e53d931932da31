"""Cleans our directories at a start by what the database knows.

A crash leaves torn uploads, files whose deletion was committed, and plans of ended jobs. These are ours, no reply has
promised them, and they are removed. Everything else is moved aside and reported, never deleted: an older copy of the
database may not know it yet, or it may not be ours.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from neaptide.engine.private_files import make_private_directory
from neaptide.server.batches.storing import batch_rows, file_rows
from neaptide.server.batches.storing.data_dir import CACHE, FILES, JOBS, MOVED_ASIDE, sync_directory
from neaptide.server.batches.storing.store import Store

logger = logging.getLogger(__name__)

_UPLOAD = re.compile(r"upload-[0-9a-f]{16}\.tmp")
_COPY = re.compile(r"file-[0-9a-f]{24}(\.tmp)?")
_JOB_FILE = re.compile(r"(batch_[0-9a-f]{24})\.(tokens|offsets|prefixes|replies|plan|sha256)")
_SHOWN_NAMES = 5
Verdict = Callable[[str], bool | None]
"""Decision about a name: True keeps it, False removes it, None means unknown."""


def tidy(store: Store, now_s: float) -> None:
    """Removes what crashes left in the data directory and moves unknown entries aside. Blocking; at start only."""
    for folder, verdict in judges(store).items():
        _tidy_folder(store.data_dir / folder, verdict, place_aside(store, now_s) / folder)


def place_aside(store: Store, now_s: float) -> Path:
    """Target of entries that are moved aside now."""
    return store.data_dir / MOVED_ASIDE / time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime(now_s))


def missing_commits(store: Store) -> list[str]:
    """A line about acknowledged commits that the database lacks."""
    count = store.database.num_missing_commits
    if not count:
        return []
    return [
        f"the database {store.database.name} lacks its last {count} commits: an older copy was put back, or its "
        "write-ahead log was lost or damaged; files that it does not know are moved aside"
    ]


def judges(store: Store) -> dict[str, Verdict]:
    """Decision for the entries of each folder."""
    found = {FILES: judge_files(store), JOBS: judge_jobs(store)}
    if store.blobs is not None:
        found[CACHE] = judge_copies(store)
    return found


def judge_copies(store: Store) -> Verdict:
    """Decision for copies of shared storage, which contain nothing else."""
    known = store.read_blocking(file_rows.all_file_ids)

    def verdict(name: str) -> bool | None:
        if name in known:
            return True
        return False if _COPY.fullmatch(name) or _UPLOAD.fullmatch(name) else None

    return verdict


def judge_files(store: Store) -> Verdict:
    known = store.read_blocking(file_rows.all_file_ids)
    deleted = set(store.read_blocking(file_rows.unswept_files))
    # Finalizing writes them again and compares existing ones, whether it had chosen their names or not.
    planned = store.read_blocking(file_rows.planned_file_ids)

    def verdict(name: str) -> bool | None:
        if name in known or name in planned:
            return True
        is_torn = _UPLOAD.fullmatch(name) is not None or name.removesuffix(".tmp") in planned
        return False if is_torn or name in deleted else None

    return verdict


def judge_jobs(store: Store) -> Verdict:
    batches = store.read_blocking(batch_rows.all_batch_ids)
    live = {record.id for record in store.read_blocking(batch_rows.live_batches)}

    def verdict(name: str) -> bool | None:
        found = _JOB_FILE.fullmatch(name)
        if found is None or found[1] not in batches:
            return None
        return found[1] in live

    return verdict


def _tidy_folder(folder: Path, verdict: Verdict, aside: Path) -> None:
    with os.scandir(folder) as entries:
        found = [(Path(entry.path), entry.is_file(follow_symlinks=False)) for entry in entries]
    unknown: list[Path] = []
    for path, is_file in found:
        judgement = verdict(path.name)
        if judgement is None or (judgement is False and not is_file):
            unknown.append(path)
        elif judgement is False:
            path.unlink()
            logger.info("removed %s, which a crash had left", path.name)
    if unknown:
        target = move_aside(folder, sorted(unknown), aside)
        names = ", ".join(sorted(path.name for path in unknown)[:_SHOWN_NAMES])
        more = ", ..." if len(unknown) > _SHOWN_NAMES else ""
        logger.warning(
            "moved %d entries that the database does not know from %s to %s: %s%s",
            *(len(unknown), folder, target, names, more),
        )


def move_aside(folder: Path, paths: list[Path], aside: Path) -> Path:
    """Moves entries of a folder durably to ``aside``, or to a new name if that exists; returns their place."""
    target, number = aside, 1
    while target.exists():
        number += 1
        target = aside.with_name(f"{aside.name}-{number}")
    for directory in (target.parents[1], target.parent, target):
        make_private_directory(directory)
    for path in paths:
        path.rename(target / path.name)
    for directory in (target.parents[2], target.parents[1], target.parent, target, folder):
        sync_directory(directory)
    return target

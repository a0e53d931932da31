"""The plans of running batches on shared storage, and this server's copies of them. Blocking; for a thread."""

import logging
from pathlib import Path

from neaptide.engine.offline.token_file import TokenFile
from neaptide.server.batches.checking.job_files import (
    PLAN_SUFFIXES,
    SEAL_SUFFIX,
    JobPlan,
    check_seal,
    plan_file,
    read_plan,
    remove_plan,
)
from neaptide.server.batches.storing.shared.blobs import Blobs

logger = logging.getLogger(__name__)


def put_plan(blobs: Blobs, stem: Path, key: str) -> None:
    """A sealed plan, file by file, under one key.

    Raises:
        BlobsUnavailableError: not all of it is there.
    """
    for suffix in PLAN_SUFFIXES:
        path = plan_file(stem, suffix)
        if path.exists():
            blobs.put(path, f"{key}{suffix}")


def remove_plan_blobs(blobs: Blobs, key: str) -> None:
    """Raises BlobsUnavailableError."""
    for suffix in PLAN_SUFFIXES:
        blobs.remove(f"{key}{suffix}")


def copy_of_plan(blobs: Blobs, stem: Path, key: str, scratch: Path) -> JobPlan:
    """The plan at ``stem``, fetched unless a sound copy of the same lies there. What lies there may be of a check that
    another server's has overtaken: the same prompts perhaps, under other numbers. So the seal is the storage's.

    Raises:
        FileNotFoundError: the storage has not got it.
        ValueError, msgspec.DecodeError: what it has is damaged.
        OSError: not now.
    """
    try:
        blobs.fetch(f"{key}{SEAL_SUFFIX}", plan_file(stem, SEAL_SUFFIX), scratch)
        return _sound_plan(stem)
    except (FileNotFoundError, ValueError):
        remove_plan(stem)
    for suffix in PLAN_SUFFIXES:
        try:
            blobs.fetch(f"{key}{suffix}", plan_file(stem, suffix), scratch)
        except FileNotFoundError:
            # Only this one may be missing: a plan whose prompts share nothing works as well without it.
            if suffix != ".prefixes":
                raise
    return _sound_plan(stem)


def _sound_plan(stem: Path) -> JobPlan:
    check_seal(stem)
    plan = read_plan(stem)
    if len(TokenFile(stem)) != len(plan.params_index):
        raise ValueError("token file and plan do not belong together")
    return plan

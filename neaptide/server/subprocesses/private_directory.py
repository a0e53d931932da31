"""A temporary directory that only this user can open, and that does not stay behind.

The owner holds a lock on it, which the system releases when the process ends, for whatever reason. Each new owner
removes the directories without a lock. (Tools that tidy temporary directories by age spare locked ones.)
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "neaptide-own-"
TRIES = 3
"""Attempts to lock a new directory. Another process may lock it first, as abandoned, or the file system may have no
locks. Without a lock the directory is not removed by others."""


class PrivateDirectory:
    """A directory of mode 0700. Call ``remove`` in the end."""

    def __init__(self) -> None:
        """Makes the directory. Raises OSError."""
        remove_abandoned()
        for left in reversed(range(TRIES)):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._held_by = _held(self.path)
            if self._held_by is not None or left == 0:
                return
            shutil.rmtree(self.path, ignore_errors=True)

    def remove(self) -> None:
        """Removes the directory with its contents. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        held_by, self._held_by = self._held_by, None
        if held_by is not None:
            os.close(held_by)


def remove_abandoned() -> None:
    """Removes this user's directories without a lock. Never raises."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        held_by = _held(path)
        if held_by is not None:
            if os.fstat(held_by).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
            os.close(held_by)


def _held(path: Path) -> int | None:
    """A descriptor that holds the lock. None if another process holds it, or the directory is missing or not ours to
    open."""
    with contextlib.ExitStack() as undone:
        try:
            held_by = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            undone.callback(os.close, held_by)
            fcntl.flock(held_by, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held_by), os.stat(path)):
                undone.pop_all()
                return held_by
        except OSError:
            pass
    return None

"""A directory in the system's temporary one that only this user can open, and that is not left behind for good.

Who has it holds a lock on it, which the system takes back however its process ends. Whoever makes one removes those
that nobody holds any more. (What tidies temporary directories by age leaves a locked one alone, too.)
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "neaptide-own-"
TRIES = 3
"""Of a lock on a new one: another one may take it for abandoned first, and a file system may have no locks. Then nobody
can hold it, and it stays."""


class PrivateDirectory:
    """Mode 0700. ``remove`` it in the end."""

    def __init__(self) -> None:
        """Raises OSError."""
        remove_abandoned()
        for left in reversed(range(TRIES)):
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._held_by = _held(self.path)
            if self._held_by is not None or left == 0:
                return
            shutil.rmtree(self.path, ignore_errors=True)

    def remove(self) -> None:
        """With all that is in it. Once more does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        held_by, self._held_by = self._held_by, None
        if held_by is not None:
            os.close(held_by)


def remove_abandoned() -> None:
    """Those of this user that nobody holds. Never raises."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        held_by = _held(path)
        if held_by is not None:
            if os.fstat(held_by).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
            os.close(held_by)


def _held(path: Path) -> int | None:
    """A descriptor that holds it; None where another one does, where it is gone, or no directory that we may open."""
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

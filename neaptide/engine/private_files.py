"""Files and directories that only their owner can read, whatever the umask. They hold prompts, answers, or parts of
them."""

import os
import stat

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


def private_opener(path: str, flags: int) -> int:
    """Opener for ``open``. Gives the file private permissions before the first byte is written, even if it exists
    already."""
    fd = os.open(path, flags, FILE_MODE)
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) != FILE_MODE:
            os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_private_directory(path: str | os.PathLike[str]) -> None:
    """Makes the directory unless it exists, and makes it private either way."""
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    if stat.S_IMODE(os.stat(path).st_mode) != DIRECTORY_MODE:
        os.chmod(path, DIRECTORY_MODE)

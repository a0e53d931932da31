"""Files that a command writes after minutes of work: whether they can be written is told before."""

import os
from pathlib import Path


def check_writable(path: Path) -> None:
    """Creates nothing.

    Raises:
        ValueError: a file could not be written there; the message is one line.
    """
    if path.is_dir():
        raise ValueError(f"{path}: is a directory, not a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{path}: cannot be written")

"""What a child process of the server does first: it stands behind what is served, within its memory, and does not
outlive its parent.
"""

import contextlib
import os
import resource
import sys
from pathlib import Path
from typing import BinaryIO


def stand_back(niceness: int, is_idle: bool = False) -> None:
    """What is served goes first.

    Args:
        is_idle: run only when no other process wants the core, where the system knows that.
    """
    os.nice(niceness)
    if is_idle:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def pipes() -> tuple[BinaryIO, BinaryIO]:
    """Where the server's frames come in and where answers go. What a library prints is no part of the conversation: it
    goes to standard error."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return source, sink


def bound_memory(num_bytes: int, beside_what_is_here: bool = False) -> None:
    """Of address space; a process that wants more gets MemoryError, and is the first to go where the machine has none
    left.

    Args:
        beside_what_is_here: what is mapped already does not count.
    """
    if beside_what_is_here:
        num_bytes += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # rather this process than one that serves

"""What a child process of the server does first: it stands behind what is served, within its memory, and does not
outlive its parent.
"""

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BURST_S, BURST_REST_S = 0.004, 0.2
"""Two percent of a core."""


def stand_back(niceness: int, is_idle: bool = False) -> None:
    """What is served goes first.

    Args:
        is_idle: run only when no other process wants the core, where the system knows that.
    """
    os.nice(niceness)
    if is_idle:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@contextlib.contextmanager
def in_bursts(work_s: float = BURST_S, rest_s: float = BURST_REST_S) -> Iterator[None]:
    """Rests after every few milliseconds of processor time.

    Threads that compute a step in lockstep lose far more than what is taken from one of them, for as long as something
    is taken: a step in four somewhat longer is better than all of ten seconds four times as long.
    """
    before = signal.signal(signal.SIGPROF, lambda *_: time.sleep(rest_s))
    signal.setitimer(signal.ITIMER_PROF, work_s, work_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


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

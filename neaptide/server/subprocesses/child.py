"""Setup of the server's child processes: low priority, bounded memory, and no longer life than the parent's."""

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
"""Seconds of work and of rest, which are two percent of a core."""


def set_idle_priority(niceness: int, is_idle: bool = False) -> None:
    """Lowers this process's priority below that of the engine and the API process.

    Args:
        is_idle: run only when no other process wants the core, if the system supports that.
    """
    os.nice(niceness)
    if is_idle:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@contextlib.contextmanager
def in_bursts(work_s: float = BURST_S, rest_s: float = BURST_REST_S) -> Iterator[None]:
    """Sleeps after every few milliseconds of processor time.

    Threads that compute a step in lockstep all wait for the slowest one. With short bursts, one step in four is a
    little longer. Without them, all steps of ten seconds would take four times as long.
    """
    before = signal.signal(signal.SIGPROF, lambda *_: time.sleep(rest_s))
    signal.setitimer(signal.ITIMER_PROF, work_s, work_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def pipes() -> tuple[BinaryIO, BinaryIO]:
    """Input and output for the server's frames. Redirects the output of libraries to standard error."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return source, sink


def bound_memory(num_bytes: int, beside_what_is_here: bool = False) -> None:
    """Limits the address space: a larger request raises MemoryError. Makes this process the first one that the kernel
    kills when memory runs out.

    Args:
        beside_what_is_here: the limit excludes what is mapped already.
    """
    if beside_what_is_here:
        num_bytes += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # Kill this process before one that serves.

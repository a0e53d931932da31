"""Ends a program with all processes that it has started, on a signal or when the parent process has ended in any way.

Some servers do not end their own children. The keeper runs between such a server and us. When it gets a stop signal or
its own parent ends, it sends the program a stop signal, waits, and kills all processes that are left.

    python -m benchmarks.keeper PARENT_PID COMMAND ...
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil

from neaptide.engine.process.parent import adopt_orphans, stop_with_parent

GRACE_S = 20.0
"""Time that a program has to stop before it is killed."""


def kept(command: Sequence[str]) -> list[str]:
    """The command that starts ``command`` under a keeper that ends with this process. The calling thread must live as
    long as this process."""
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


class _ToldToStopError(Exception):
    pass


def keep(parent_pid: int, command: Sequence[str]) -> int:
    """Runs the command until it ends or this process gets a stop signal; returns its exit status.

    Raises:
        SystemExit: the parent has already ended.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _on_signal)
    stop_with_parent(parent_pid)
    adopt_orphans()
    try:
        process = subprocess.Popen(command)
        try:
            return process.wait()
        except _ToldToStopError:
            process.terminate()
            return process.wait(GRACE_S)
    except (_ToldToStopError, subprocess.TimeoutExpired):
        return -signal.SIGKILL
    finally:
        _end_all()


def _on_signal(number: int, frame: Any) -> None:
    _take_no_more_signals()  # a second signal must not interrupt the stop
    raise _ToldToStopError


def _take_no_more_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _end_all() -> None:
    """Kills all processes below this one. Orphans become our children, and the next round kills them."""
    _take_no_more_signals()
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


if __name__ == "__main__":
    status = keep(int(sys.argv[1]), sys.argv[2:])
    sys.exit(status if status >= 0 else 128 - status)

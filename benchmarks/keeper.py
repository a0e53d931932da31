"""Ends a program with all that it has started, when it is to end or when what started it has ended, however that was.

Not every server takes its own children along. So this stands between it and us: it tells the program to stop when it is
told to, or when its own parent is gone, gives it time, and kills whatever is left below it then.

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
"""For a program that was told to stop."""


def kept(command: Sequence[str]) -> list[str]:
    """What the thread that lives as long as this process has to start in place of ``command``."""
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


class _ToldToStopError(Exception):
    pass


def keep(parent_pid: int, command: Sequence[str]) -> int:
    """Runs the command to its end, or until this process is told to stop; returns its exit status.

    Raises:
        SystemExit: the parent is gone already.
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
    _take_no_more_signals()  # what is told twice is stopped once
    raise _ToldToStopError


def _take_no_more_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _end_all() -> None:
    """Kills whatever is below this process; what it leaves in turn is ours the next time round."""
    _take_no_more_signals()
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


if __name__ == "__main__":
    status = keep(int(sys.argv[1]), sys.argv[2:])
    sys.exit(status if status >= 0 else 128 - status)

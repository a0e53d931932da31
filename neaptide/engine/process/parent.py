"""Child processes that do not outlive their parent."""

import ctypes
import os
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""A terminal sends them to every process of a command: for Ctrl-C, when it is closed (HUP), for Ctrl-\\ (QUIT)."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def stop_with_parent(parent_pid: int) -> None:
    """SIGTERM for this process when its parent ends, so that it stops in good order.

    Raises:
        SystemExit: the parent is gone already.
    """
    _ask_for_signal(signal.SIGTERM, parent_pid)


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends; stop signals are the parent's to act on.

    Raises:
        SystemExit: the parent is gone already.
    """
    _ask_for_signal(signal.SIGKILL, parent_pid)
    ignore_stop_signals()


def ignore_stop_signals() -> None:
    """For a process whose parent decides when it ends."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose own parent ends, in place of the system's first process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _ask_for_signal(number: signal.Signals, parent_pid: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        raise SystemExit("the server process is gone")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)

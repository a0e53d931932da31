"""Child processes that do not outlive their parent."""

import ctypes
import os
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a terminal sends to every process of a command: Ctrl-C, closing it (HUP), Ctrl-\\ (QUIT)."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def stop_with_parent(parent_pid: int) -> None:
    """Sends SIGTERM to this process when its parent ends, so that it can shut down cleanly.

    Raises:
        SystemExit: the parent has already ended.
    """
    _ask_for_signal(signal.SIGTERM, parent_pid)


def die_with_parent(parent_pid: int) -> None:
    """Sends SIGKILL to this process when its parent ends, and ignores stop signals: the parent handles those.

    Raises:
        SystemExit: the parent has already ended.
    """
    end_with_parent(parent_pid)
    ignore_stop_signals()


def end_with_parent(parent_pid: int) -> None:
    """Sends SIGKILL to this process when its parent ends.

    Raises:
        SystemExit: the parent has already ended.
    """
    _ask_for_signal(signal.SIGKILL, parent_pid)


def ignore_stop_signals() -> None:
    """Ignores stop signals, for a process whose parent decides when it ends."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def adopt_orphans() -> None:
    """Makes this process, instead of init, the parent of orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _ask_for_signal(number: signal.Signals, parent_pid: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        raise SystemExit("the server process has ended")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)

"""Signals for processes that may end by themselves meanwhile: a child follows its parent at a moment of its own."""

import signal
from collections.abc import Iterable
from contextlib import suppress

import psutil


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """The signal for each of them, in their order; who is gone gets none. Nor does another process that has got the id
    of one that is gone: psutil knows when its own began."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)

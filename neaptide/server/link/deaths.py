"""What the end of a process says against the work that it had in hand."""

import signal
from enum import IntEnum

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class Evidence(IntEnum):
    """How much an engine's death says against the requests of its last step."""

    EXCUSED = 0
    """Something else in the step is the likelier cause."""
    WEAK = 1
    """It was killed from outside: by an operator, or by the kernel, which may have needed memory for others."""
    STRONG = 2
    """It crashed, gave up or hung."""


def cause_of_death(status: int | None) -> str:
    """How a process ended, for the log; ``status`` is None while it still runs, and minus the signal that killed it."""
    if status is None:
        return "the server killed it"
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"killed by signal {-status}"
    hint = ": an operator, or the kernel when memory ran out" if -status == signal.SIGKILL else ""
    return f"killed by signal {-status}, {name}{hint}"


def was_killed_from_outside(status: int | None) -> bool:
    """Whether a process that ended with this status (minus the signal) was ended by another one."""
    return status is not None and -status in _FROM_OUTSIDE

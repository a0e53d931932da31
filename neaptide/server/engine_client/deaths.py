"""Evidence that the end of a process gives against its running requests."""

import signal
from enum import IntEnum

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class Evidence(IntEnum):
    """Strength of the evidence that an engine's death gives against the requests of its last step."""

    EXCUSED = 0
    """Another request of the step is the likelier cause."""
    WEAK = 1
    """It was killed from outside: by an operator, or by the kernel for lack of memory."""
    STRONG = 2
    """It crashed, hung or exited with an error."""


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
    """Whether another process ended the process with this status (minus the signal)."""
    return status is not None and -status in _FROM_OUTSIDE

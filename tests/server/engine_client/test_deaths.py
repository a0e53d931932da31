"""What the log says of a process that has ended."""

import signal

import pytest

from neaptide.server.engine_client.deaths import cause_of_death


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (-signal.SIGKILL, "killed by signal 9, SIGKILL: an operator, or the kernel when memory ran out"),
        (-signal.SIGSEGV, "killed by signal 11, SIGSEGV"),
        (-255, "killed by signal 255"),
        (None, "the server killed it"),
    ],
)
def test_a_death_has_a_cause(status: int | None, cause: str) -> None:
    assert cause_of_death(status) == cause

"""Waiting for what other tasks, threads and processes do, on machines of any speed.

The limit is there lest a test hang. It says nothing of how long anything may take: a test of a deadline turns the clock
that the deadline is on (``tests.server.engine_client.loop_clock``), counts something else than seconds, or uses a
``Stopwatch``.
"""

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

PATIENCE_S = 300.0
"""Below the limit of a whole test in ``pyproject.toml``, so that who waits in vain says for what."""


async def until(condition: Callable[[], object]) -> None:
    """Lets everything else go on until the condition, or what it returns to be awaited, holds.

    Raises:
        AssertionError: it does not, in all the patience that there is.
    """
    deadline_s = time.monotonic() + PATIENCE_S  # not the loop's clock, which a test may turn
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline_s, "waited in vain"
        await asyncio.sleep(0.002)


def until_here(
    condition: Callable[[], object], message: Callable[[], str] = lambda: "waited in vain", every_s: float = 0.005
) -> None:
    """The same where no loop runs, for what another thread or process does. The condition is looked at ``every_s``.

    Raises:
        AssertionError: it does not hold in all the patience that there is.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, message()
        time.sleep(every_s)


class Stopwatch:
    """Seconds that this process and those that it started take, from now on, less those in which the kernel kept one of
    their threads waiting for a processor that ran others. So a limit on them holds on a busy machine, too; waiting for
    a timer, a lock or a disk counts in full.

    ``children=False`` looks at this process alone, which is quick.
    """

    def __init__(self, *, children: bool = True) -> None:
        self._children = children
        self._start_s = time.monotonic()
        self._held_up_s = self._now_held_up_s()

    @property
    def held_up_s(self) -> float:
        return sum(seconds - self._held_up_s.get(thread, 0.0) for thread, seconds in self._now_held_up_s().items())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start_s - self.held_up_s

    def _now_held_up_s(self) -> dict[str, float]:
        """By thread: how long it has been ready to run without running, in its life."""
        found: dict[str, float] = {}
        children = psutil.Process().children(recursive=True) if self._children else []
        for pid in (os.getpid(), *(child.pid for child in children)):
            with suppress(OSError):  # it ended meanwhile
                for path in Path(f"/proc/{pid}/task").iterdir():
                    found[path.name] = int((path / "schedstat").read_text().split()[1]) / 1e9
        return found

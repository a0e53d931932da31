"""The clock of an event loop in the hands of a test."""

import asyncio

from tests.server.asgi import settle


class LoopClock:
    """The running loop's time.

    It goes on as ever, so that sockets, threads and servers do what they do, and jumps where a test says so. With
    limits of many minutes no machine is so slow that one is reached between two jumps.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ahead_s = 0.0
        real = loop.time
        loop.time = lambda: real() + self._ahead_s  # type: ignore[method-assign]

    async def pass_s(self, seconds: float) -> None:
        """So much later, and whatever became due has been done; what could run before has run before."""
        await settle()
        self._ahead_s += seconds
        await settle()

"""How a server stops: what a stop signal begins, and what a second one cuts short.

first signal     /ready and new work are answered 503 on connections old and new, batches leave the engine
until the last   streams and other replies that had begun may end, for ``drain_timeout_s`` at most
then             the listener closes, what still runs is cut: a stream ends with the error ``server_shutdown``
second signal    the same at once
"""

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Protocol

from neaptide.engine.process.parent import STOP_SIGNALS

if TYPE_CHECKING:  # an engine that runs in another interpreter imports this, and has no web framework
    import uvicorn
    from starlette.types import ASGIApp, Receive, Scope, Send

    from neaptide.server.context import ServingContext

LAST_REPLIES_S = 1
"""For the short replies, probes and refusals, that began while others were waited for."""
CUT_S = 1.0
"""For streams that are cut to say so to their readers."""


class Suspendable(Protocol):
    def suspend(self) -> None: ...


class Drain:
    """Waits for the replies that had begun when the signal came, while the listener stays open.

    A load balancer needs the open listener: a connection that is refused is a fault to it, a 503 of ``/ready`` an
    orderly leave.
    """

    def __init__(
        self, server: "uvicorn.Server", context: "ServingContext", batches: Suspendable, timeout_s: float
    ) -> None:
        self._server = server
        self._context = context
        self._batches = batches
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Takes over the stop signals, but not SIGHUP under ``nohup``."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        """The first call begins the drain, another one ends it."""
        if self._task is not None:
            self._server.force_exit = self._server.should_exit = True
            return
        self._context.draining = True
        self._batches.suspend()
        self._task = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        replies = set(self._server.server_state.tasks)
        if replies:
            await asyncio.wait(replies, timeout=self._timeout_s)
        self._server.should_exit = True


def ends_quietly(app: "ASGIApp") -> "ASGIApp":
    """Who makes a reply has ended it when it is cut. Beyond that uvicorn would log the cut as an error, with a
    traceback for each reply."""

    async def until_cut(scope: "Scope", receive: "Receive", send: "Send") -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return until_cut


async def cut(replies: set[asyncio.Task[None]]) -> None:
    """Ends what still runs after a second stop signal, while the engine is not gone: they must not blame it."""
    for task in replies:
        task.cancel()
    if replies:
        await asyncio.wait(replies, timeout=CUT_S)

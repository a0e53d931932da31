"""How a server stops after a stop signal, and after a second one.

first signal     /ready and new requests get 503 on all connections; batches leave the engine
drain            streams and other running replies may end, for at most ``drain_timeout_s``; refusals are sent for at
                 least ``drain_min_s``
end              the listener closes; remaining streams end with the error ``server_shutdown``
second signal    ends the drain at once
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
"""Time for short replies, probes and refusals that began during the wait."""
CUT_S = 1.0
"""Time for streams that are cut to send their error."""


class Suspendable(Protocol):
    def suspend(self) -> None: ...


class Reloader(Protocol):
    def reload(self) -> object: ...


class Drainable(Protocol):
    """Other processes that answer clients."""

    def drain(self) -> set[asyncio.Task[None]]:
        """Passes a stop signal on. Returns tasks that end with the processes."""
        ...


class Drain:
    """Waits for the replies that were running when the signal came, while the listener stays open.

    A load balancer needs the open listener: a refused connection looks like a fault, a 503 from ``/ready`` like an
    orderly exit.

    Args:
        batches: what to suspend at the signal, if anything.
        timeout_s: longest wait for the replies that run.
        min_s: shortest time for which the listener stays open. A load balancer may send requests until it has looked
            at ``/ready`` again.
        others: other processes of the server, which get the same signals.
    """

    def __init__(
        self,
        server: "uvicorn.Server",
        context: "ServingContext",
        batches: Suspendable | None,
        timeout_s: float,
        min_s: float = 0.0,
        others: Drainable | None = None,
    ) -> None:
        self._server = server
        self._context = context
        self._batches = batches
        self._timeout_s = timeout_s
        self._min_s = min_s
        self._others = others
        self._task: asyncio.Task[None] | None = None

    def install(self, reloader: "Reloader | None" = None) -> None:
        """Installs the handlers of the stop signals. With a ``reloader`` SIGHUP reloads; else it stops, except under
        ``nohup``."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and reloader is not None:
                loop.add_signal_handler(number, reloader.reload)
            elif number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        """Starts the drain at the first call, and ends it at the next."""
        replies = set(self._server.server_state.tasks)
        if self._others is not None:
            replies |= self._others.drain()
        if self._task is not None:
            self._server.force_exit = self._server.should_exit = True
            return
        self._context.draining = True
        if self._batches is not None:
            self._batches.suspend()
        self._task = asyncio.get_running_loop().create_task(self._wait(replies))

    async def _wait(self, replies: set[asyncio.Task[None]]) -> None:
        until_s = asyncio.get_running_loop().time() + self._min_s
        if replies:
            await asyncio.wait(replies, timeout=self._timeout_s)
        await asyncio.sleep(max(until_s - asyncio.get_running_loop().time(), 0.0))
        self._server.should_exit = True


def ends_quietly(app: "ASGIApp") -> "ASGIApp":
    """An app whose replies end without an error when they are cut.

    The code that makes a reply has already ended it. uvicorn would otherwise log each cut as an error with a traceback.
    """

    async def until_cut(scope: "Scope", receive: "Receive", send: "Send") -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return until_cut


async def cut(replies: set[asyncio.Task[None]]) -> None:
    """Cancels the replies that still run after a second stop signal, while the engine is alive, so that they do not
    blame it."""
    for task in replies:
        task.cancel()
    if replies:
        await asyncio.wait(replies, timeout=CUT_S)

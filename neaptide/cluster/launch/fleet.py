"""The replicas of one machine: starts and restarts them, replaces them one by one, and changes their number."""

import asyncio
import logging
from collections.abc import Mapping

from neaptide.cluster.gateway.replicas import Replicas
from neaptide.cluster.launch.process import ReplicaProcess, devices_of, replica_settings
from neaptide.launch.serve import LaunchError
from neaptide.server.settings import Settings

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
STABLE_S = 60.0
"""A replica that lived this long resets the back-off."""


class ReplicaPlace:
    """The place of one replica: it starts one process after the other."""

    def __init__(self, name: str, settings: Settings, environment: Mapping[str, str], replicas: Replicas) -> None:
        self.name = name
        self._settings = settings
        self._environment = environment
        self._replicas = replicas
        self._process: ReplicaProcess | None = None
        self._has_served = False
        self._is_replaced = False
        """The current process is ending, and another one starts at once."""
        self._gone = asyncio.Event()
        """Set when no other process is to start."""

    @property
    def is_going(self) -> bool:
        """Whether it drains without a successor."""
        return self._gone.is_set()

    def dismiss(self) -> None:
        """Ends the place: it gets no new requests, may finish those it has, and no process follows."""
        self._gone.set()
        self._end_life()

    def stop_soon(self) -> None:
        """Ends the place when the whole fleet stops. Unlike after ``dismiss``, requests may still be forwarded to it. A
        second call cuts its drain short."""
        is_first = not self._gone.is_set()
        self._gone.set()
        if self._process is not None and not (is_first and self._process.is_told):
            self._process.stop_soon()

    async def replace(self) -> None:
        """Drains the current process and starts another one. Returns when that one takes work, or when the
        place ends."""
        self._is_replaced = True
        self._end_life()
        # Not ready now: the name is unknown until the next process joins.
        came = asyncio.ensure_future(self._replicas.until(lambda: self._replicas.is_ready(self.name)))
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({came, gone}, return_when=asyncio.FIRST_COMPLETED)
            if came.done():
                came.result()
        finally:
            for waiting in (came, gone):
                waiting.cancel()

    def _end_life(self) -> None:
        # Requests stop before the signal, because a draining server would refuse them.
        self._replicas.leave(self.name)
        if self._process is not None and not self._process.is_told:
            self._process.stop_soon()

    async def keep(self, must_serve: bool) -> None:
        """Keeps a process running. Returns after ``dismiss`` or ``stop_soon``, when the last process has ended.

        A process that cannot start now (no memory, process or port) counts as ended.

        Args:
            must_serve: raise an error if the first process ends before it takes work.

        Raises:
            LaunchError: the first process ended before it took work.
        """
        backoff_s = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while not self._gone.is_set():
            started_s = loop.time()
            try:
                end = f"ended with status {await self._one_life()}"
            except (OSError, LaunchError) as error:
                end = f"could not be started: {error}"  # out of processes or descriptors: a later try may succeed
            if self._gone.is_set():
                return
            if self._is_replaced:
                continue
            if must_serve and not self._has_served:
                raise LaunchError(f"{self.name} {end} before it was ready")
            if loop.time() - started_s > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            logger.warning("%s %s; it restarts in %.1f s", self.name, end, backoff_s)
            await self._rest(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _one_life(self) -> int:
        """Runs one process; returns its exit status."""
        self._is_replaced = False  # this is the requested replacement
        process = self._process = await ReplicaProcess.start(self._settings, self._environment)
        replica = self._replicas.join(self.name, process.url)
        try:
            if self.is_going or self._is_replaced:
                self._end_life()  # requested while the process was starting
            return await process.ended()
        finally:
            self._has_served |= replica.has_served
            self._process = None
            self._replicas.leave(self.name)
            await process.stop()

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._gone.wait()
        except TimeoutError:
            return


class Fleet:
    """Keeps replicas running from ``run`` until it is stopped. Implements ``Suspendable``.

    Args:
        size: number of replicas at the start.
        max_size: largest number of replicas, into which the machine's devices are divided.
    """

    def __init__(self, settings: Settings, size: int, max_size: int, replicas: Replicas) -> None:
        self._settings = settings
        self._size = size
        self._max_size = max_size
        self._replicas = replicas
        self._places: dict[int, ReplicaPlace] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._is_stopping = False
        self._roll_wanted = asyncio.Event()

    # ---- requests ----

    @property
    def size(self) -> int:
        """Replicas that take work or will."""
        return sum(not place.is_going for place in self._places.values())

    def suspend(self) -> None:
        """Drains all replicas and starts no more, as ``Suspendable`` says."""
        self._is_stopping = True
        for place in self._places.values():
            place.stop_soon()

    def grow(self, count: int) -> None:
        """Starts this many replicas, as far as there are free places. A draining replica keeps its place until it has
        ended."""
        free = [number for number in range(self._max_size) if number not in self._places]
        for number in [] if self._is_stopping else free[:count]:
            self._begin(number, must_serve=False)

    def shrink(self, name: str) -> None:
        """Drains and ends this replica."""
        for place in self._places.values():
            if place.name == name:
                place.dismiss()

    def roll_soon(self) -> None:
        """Replaces all replicas one after another; each waits until the one before takes work. A call during a
        replacement starts another one after it."""
        logger.info("replacing all replicas, one after another")
        self._roll_wanted.set()

    # ---- running ----

    async def run(self) -> None:
        """Runs the fleet. Returns after ``suspend``, when all replicas have ended.

        Raises:
            LaunchError: one of the first replicas could not start.
        """
        for number in range(self._size):
            self._begin(number, must_serve=True)
        rolling = asyncio.create_task(self._roll_on())
        try:
            while self._lives:
                await asyncio.wait(self._lives.values(), return_when=asyncio.FIRST_COMPLETED)
                for number in [number for number, life in self._lives.items() if life.done()]:
                    del self._places[number]
                    self._lives.pop(number).result()
        finally:
            left = [rolling, *self._lives.values()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _begin(self, number: int, must_serve: bool) -> None:
        name = f"replica-{number + 1}"
        settings = replica_settings(self._settings, name, LOOPBACK)
        place = self._places[number] = ReplicaPlace(name, settings, devices_of(number, self._max_size), self._replicas)
        self._lives[number] = asyncio.create_task(place.keep(must_serve))

    async def _roll_on(self) -> None:
        while True:
            await self._roll_wanted.wait()
            self._roll_wanted.clear()
            for place in list(self._places.values()):
                if not place.is_going:
                    logger.info("replacing %s", place.name)
                    await place.replace()
            logger.info("all replicas have been replaced")

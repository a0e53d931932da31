"""The replicas of one machine: places for them, life after life, replaced one by one, more of them or fewer."""

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
"""A replica that lived so long starts the back-off anew."""


class Place:
    """One replica, life after life."""

    def __init__(self, name: str, settings: Settings, environment: Mapping[str, str], replicas: Replicas) -> None:
        self.name = name
        self._settings = settings
        self._environment = environment
        self._replicas = replicas
        self._process: ReplicaProcess | None = None
        self._has_served = False
        self._is_replaced = False
        """The life that is to end is to be followed by another one at once."""
        self._gone = asyncio.Event()
        """Set when no life is to follow."""

    @property
    def is_going(self) -> bool:
        """It drains, and no life will follow."""
        return self._gone.is_set()

    def dismiss(self) -> None:
        """It gets nothing any more, what it has may end, and no life follows."""
        self._gone.set()
        self._end_life()

    def stop_soon(self) -> None:
        """As ``dismiss``, when all of them stop: what they still answer may be asked of them. A second call cuts it
        short."""
        is_first = not self._gone.is_set()
        self._gone.set()
        if self._process is not None and not (is_first and self._process.is_told):
            self._process.stop_soon()

    async def replace(self) -> None:
        """The same, and another life follows; returns when that one takes work, or when the place is given up."""
        self._is_replaced = True
        self._end_life()
        # The name is unknown until the next life has it.
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
        # First no more requests, then the signal: the server would refuse what comes after it.
        self._replicas.leave(self.name)
        if self._process is not None and not self._process.is_told:
            self._process.stop_soon()

    async def keep(self, must_serve: bool) -> None:
        """Returns after ``dismiss``, when the last life has ended.

        A life that cannot begin (no memory, no process, no port for the moment) is one that has ended.

        Args:
            must_serve: it is an error if the first life ends before it takes work.

        Raises:
            LaunchError: it is.
        """
        backoff_s = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while not self._gone.is_set():
            started_s = loop.time()
            try:
                end = f"ended with status {await self._one_life()}"
            except (OSError, LaunchError) as error:
                end = f"could not be started: {error}"  # out of processes or descriptors: the next try may find them
            if self._gone.is_set():
                return
            if self._is_replaced:
                continue
            if must_serve and not self._has_served:
                raise LaunchError(f"{self.name} {end} before it was ready")
            if loop.time() - started_s > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            logger.warning("%s %s; it is started again in %.1f s", self.name, end, backoff_s)
            await self._rest(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _one_life(self) -> int:
        """Its exit status."""
        self._is_replaced = False  # this is the life that was asked for
        process = self._process = await ReplicaProcess.start(self._settings, self._environment)
        replica = self._replicas.join(self.name, process.url)
        try:
            if self.is_going or self._is_replaced:
                self._end_life()  # it was told while the process was being made
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
    """Keeps replicas running, from ``run`` to a stop. Implements ``Suspendable``.

    Args:
        size: of the beginning.
        max_size: as many parts of the machine's devices there are.
    """

    def __init__(self, settings: Settings, size: int, max_size: int, replicas: Replicas) -> None:
        self._settings = settings
        self._size = size
        self._max_size = max_size
        self._replicas = replicas
        self._places: dict[int, Place] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}
        self._is_stopping = False
        self._roll_wanted = asyncio.Event()

    # ---- what is asked ----

    @property
    def size(self) -> int:
        """Replicas that take work, or will."""
        return sum(not place.is_going for place in self._places.values())

    def suspend(self) -> None:
        """As in ``Suspendable``: all replicas drain, none is started any more."""
        self._is_stopping = True
        for place in self._places.values():
            place.stop_soon()

    def grow(self, count: int) -> None:
        """So many more, as far as there is room: one that drains has its place until it has ended."""
        free = [number for number in range(self._max_size) if number not in self._places]
        for number in [] if self._is_stopping else free[:count]:
            self._begin(number, must_serve=False)

    def shrink(self, name: str) -> None:
        """This replica drains and ends."""
        for place in self._places.values():
            if place.name == name:
                place.dismiss()

    def roll_soon(self) -> None:
        """Replaces all replicas, one after another, each when the one before takes work. While that is being done: once
        more afterwards."""
        logger.info("all replicas are to be replaced, one after another")
        self._roll_wanted.set()

    # ---- at work ----

    async def run(self) -> None:
        """Returns after ``suspend``, when all of them have ended.

        Raises:
            LaunchError: one of those of the beginning refused to start.
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
        place = self._places[number] = Place(name, settings, devices_of(number, self._max_size), self._replicas)
        self._lives[number] = asyncio.create_task(place.keep(must_serve))

    async def _roll_on(self) -> None:
        while True:
            await self._roll_wanted.wait()
            self._roll_wanted.clear()
            for place in list(self._places.values()):
                if not place.is_going:
                    logger.info("%s is replaced", place.name)
                    await place.replace()
            logger.info("all replicas have been replaced")

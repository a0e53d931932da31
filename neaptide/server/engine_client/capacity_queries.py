"""Answers capacity queries over HTTP. Costs nothing without queries."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from neaptide.engine.messages import Room
from neaptide.server.engine_client.client import EngineClient, EngineUnavailableError
from neaptide.server.engine_client.events import EngineLost

EVERY_S, CACHED_EVERY_S = 0.02, 0.5
"""Least time between two queries to the engine, without and with its cached blocks, whose list takes it a
millisecond."""
ANSWER_S = 1.0
"""Longest wait for the engine, which answers after its step. Later, its last answer is used."""


class Seen(NamedTuple):
    """An answer of the engine, and when it came."""

    room: Room
    at_s: float


class CapacityQueries:
    """Queries the engine's capacity. Event loop only."""

    def __init__(self, client: EngineClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._seen: dict[bool, Seen] = {}
        """Last answers, by whether they include the cached blocks."""
        self._waiting: dict[bool, set[asyncio.Future[Seen]]] = {False: set(), True: set()}
        client.subscribe(Room, self._on_room)
        client.subscribe(EngineLost, self._on_engine_lost)

    async def ask(self, with_cached: bool) -> Seen:
        """The engine's capacity.

        Raises:
            EngineUnavailableError: there is no engine, or it has not answered yet.
        """
        seen = self._seen.get(with_cached)
        every_s = CACHED_EVERY_S if with_cached else EVERY_S
        if seen is not None and self._clock() - seen.at_s < every_s:
            return seen
        self._client.ask_room(with_cached)
        answer: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()
        self._waiting[with_cached].add(answer)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            if seen is None:
                raise EngineUnavailableError("the engine has not reported its capacity yet") from None
            return seen
        finally:
            self._waiting[with_cached].discard(answer)

    def _on_room(self, room: Room) -> None:
        seen = Seen(room, self._clock())
        for kind in {False, room.cached is not None}:
            self._seen[kind] = seen
            for answer in self._waiting[kind]:
                with contextlib.suppress(asyncio.InvalidStateError):
                    answer.set_result(seen)

    def _on_engine_lost(self, _: EngineLost) -> None:
        self._seen.clear()
        for answers in self._waiting.values():
            for answer in answers:
                with contextlib.suppress(asyncio.InvalidStateError):
                    answer.set_exception(EngineUnavailableError("the engine stopped"))

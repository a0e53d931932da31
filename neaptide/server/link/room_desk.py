"""What room for online work the engine has, for whoever asks over HTTP. Nobody asks, and it costs nothing."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from neaptide.engine.messages import Room
from neaptide.server.link.engine_client import EngineClient, EngineUnavailableError
from neaptide.server.link.events import EngineLost

EVERY_S, CACHED_EVERY_S = 0.02, 0.5
"""The engine is asked no more often, whoever asks; what its cache holds takes it a millisecond to say."""
ANSWER_S = 1.0
"""The engine answers after its step. Where that takes longer, what it said before has to do."""


class Seen(NamedTuple):
    """What the engine said, and when."""

    room: Room
    at_s: float


class RoomDesk:
    """Subscribes to the engine's answers. Event loop only."""

    def __init__(self, client: EngineClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._seen: dict[bool, Seen] = {}
        """The last words, by whether they say what is cached."""
        self._waiting: dict[bool, set[asyncio.Future[Seen]]] = {False: set(), True: set()}
        client.subscribe(Room, self._on_room)
        client.subscribe(EngineLost, self._on_engine_lost)

    async def ask(self, with_cached: bool) -> Seen:
        """
        Raises:
            EngineUnavailableError: there is no engine, or it has not said anything yet.
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
                raise EngineUnavailableError("the engine has not said what room it has") from None
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

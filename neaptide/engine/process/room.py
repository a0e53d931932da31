"""Tells what room for online work there is, when it is asked."""

from neaptide.cluster.routing import digest_of
from neaptide.engine.messages import Room, TellRoom, ToEngine
from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.online_room import online_room


class RoomTeller(EngineObserver):
    """Hears the question between two steps, and has the answer as things stand after the next one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_asked = self._wants_cached = False

    def message(self, message: ToEngine, now_s: float) -> None:
        if isinstance(message, TellRoom):
            self._is_asked = True
            self._wants_cached |= message.with_cached

    def take(self) -> Room | None:
        """The answer to all questions since the last one; None if there was none."""
        if not self._is_asked:
            return None
        room, cached = online_room(self._scheduler), None
        if self._wants_cached:
            cached = b"".join(sorted(digest_of(self._scheduler.kv.indexed_hashes())))
        self._is_asked = self._wants_cached = False
        return Room(room.free_slack_s, room.prompt_token_s, cached)

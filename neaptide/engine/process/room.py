"""Answers capacity queries."""

from collections.abc import Iterable

from neaptide.engine.kv.cache_digest import digest_of
from neaptide.engine.messages import Room, StepStats, TellRoom, ToEngine
from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.online_load import LoadMeter
from neaptide.engine.scheduler.online_room import online_room


class RoomTeller(EngineObserver):
    """Receives a capacity query between two steps and answers it after the next step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_asked = self._wants_cached = False
        self._meter = LoadMeter()

    def message(self, message: ToEngine, now_s: float) -> None:
        if isinstance(message, TellRoom):
            self._is_asked = True
            self._wants_cached |= message.with_cached

    def take(self, now_s: float, stats: Iterable[StepStats]) -> Room | None:
        """One answer to all queries since the last call; None without a query. ``stats``: of the steps since the last
        call."""
        if num_tokens := sum(one.online_prefill_tokens for one in stats):
            self._meter.note(now_s, num_tokens)
        if not self._is_asked:
            return None
        room, cached = online_room(self._scheduler), None
        if self._wants_cached:
            cached = b"".join(sorted(digest_of(self._scheduler.kv.indexed_hashes())))
        self._is_asked = self._wants_cached = False
        load = self._meter.load(now_s, room.streams_share, room.alone_token_s)
        return Room(room.free_slack_s, room.prompt_token_s, cached, load)

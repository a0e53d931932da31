"""One piece of work at a time, tenants by turns."""

import asyncio
from collections import Counter

import pytest

from neaptide.server.http.errors import OverloadedError
from neaptide.server.http.fair_queue import FairQueue
from tests.patience import until
from tests.server.asgi import settle
from tests.server.engine_client.loop_clock import LoopClock


class Work:
    """Pieces for a queue, each of which takes some time of the test's clock."""

    def __init__(self, queue: FairQueue, clock: LoopClock) -> None:
        self.queue = queue
        self._clock = clock
        self.done: list[str] = []

    def add(self, tenant: str, count: int = 1, seconds: float = 1.0) -> list[asyncio.Task[None]]:
        return [asyncio.ensure_future(self._one(tenant, seconds)) for _ in range(count)]

    async def _one(self, tenant: str, seconds: float) -> None:
        async with self.queue.turn(tenant):
            await self._clock.pass_s(seconds)
            self.done.append(tenant)


async def test_another_tenants_piece_waits_for_the_one_at_work_only(loop_clock: LoopClock) -> None:
    work = Work(FairQueue(), loop_clock)
    pieces = work.add("many", 20)
    await settle()
    await asyncio.gather(*pieces, *work.add("one"))
    assert work.done.index("one") <= 2
    assert Counter(work.done) == {"many": 20, "one": 1}


async def test_tenants_are_served_for_equal_times_and_not_equally_often(loop_clock: LoopClock) -> None:
    work = Work(FairQueue(), loop_clock)
    await asyncio.gather(*work.add("long", 10, seconds=40.0), *work.add("short", 100, seconds=10.0))
    assert 0.6 < Counter(work.done[:50])["short"] / 40 < 1.1


async def test_weights_count(loop_clock: LoopClock) -> None:
    work = Work(FairQueue({"heavy": 3.0, "light": 1.0}.__getitem__), loop_clock)
    await asyncio.gather(*work.add("light", 40, seconds=30.0), *work.add("heavy", 40, seconds=30.0))
    assert 29 <= Counter(work.done[:40])["heavy"] <= 31


async def test_who_comes_late_gets_nothing_for_the_time_before(loop_clock: LoopClock) -> None:
    work = Work(FairQueue(), loop_clock)
    early = work.add("early", 40, seconds=30.0)
    await until(lambda: len(work.done) >= 20)
    before = len(work.done)
    await asyncio.gather(*early, *work.add("late", 20, seconds=30.0))
    assert 9 <= Counter(work.done[before : before + 20])["late"] <= 11


async def test_a_wait_that_is_too_long_ends_with_503_and_takes_no_turn(loop_clock: LoopClock) -> None:
    queue = FairQueue()
    async with queue.turn("a"):

        async def wait() -> None:
            async with queue.turn("b", within_s=100.0):
                raise AssertionError("there was no turn")

        waiting = asyncio.ensure_future(wait())
        await loop_clock.pass_s(200.0)
        with pytest.raises(OverloadedError) as refused:
            await waiting
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "100")
    async with queue.turn("b", within_s=100.0):
        pass


async def test_one_that_leaves_just_as_its_turn_comes_passes_it_on() -> None:
    queue = FairQueue()
    served: list[str] = []

    async def piece(name: str) -> None:
        async with queue.turn(name):
            served.append(name)

    async with queue.turn("first"):
        leaving, staying = asyncio.ensure_future(piece("leaves")), asyncio.ensure_future(piece("stays"))
        await settle()
    leaving.cancel()  # it has the turn, and has not run since
    await asyncio.gather(leaving, staying, return_exceptions=True)
    assert served == ["stays"]

"""When the offline pool is planned, and what reaches the engine."""

import asyncio

import msgspec
import pytest

from neaptide.engine.messages import BatchDeadlineStatus, DeadlineStatus, EngineReady, PlanReady, StepOutputs, ToEngine
from neaptide.engine.offline.planning.occasions import GROWTH, LEAST_ROWS
from neaptide.server.batches.planning.planning import Planning
from neaptide.server.batches.planning.request import JobRows, PlanRequest, packed
from neaptide.server.engine_client.client import EngineClient
from tests.patience import until
from tests.server.batches.fakes import READY

FOLLOWS = msgspec.structs.replace(READY, planned_order="ends", token_s=1e-4, kv_token_s=1e-7)
PLAN = PlanReady(["job"], b"", b"")


class Link:
    def __init__(self) -> None:
        self.sent: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)


class FakePlanner:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[PlanRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[PlanReady | None] = asyncio.Queue()

    async def plan(self, request: PlanRequest) -> PlanReady | None:
        self.asked.put_nowait(request)
        return await self.answers.get()


class Scene:
    def __init__(self, info: EngineReady = FOLLOWS, period_s: float = 0.0) -> None:
        self.link, self.client, self.planner = Link(), EngineClient(), FakePlanner()
        self.client.attach(self.link, info)
        self.num_left = 0
        self.now_s = 0.0
        self.planning = Planning(
            self.planner, self.client, lambda: [self.left], period_s=period_s, now=lambda: self.now_s
        )

    def left(self) -> JobRows:
        rows = packed(range(self.num_left))
        return JobRows("job", "stem", "", self.num_left, rows, rows, b"", b"")

    def given(self, num_rows: int) -> None:
        self.num_left += num_rows
        self.planning.grown(num_rows)

    async def answered(self, plan: PlanReady | None = PLAN) -> PlanRequest:
        """The next request, once its plan has come to its end."""
        request = await self.planner.asked.get()
        self.planner.answers.put_nowait(plan)
        await self.settled()
        return request

    async def settled(self) -> None:
        """Until nothing is being planned, or the next plan is asked for."""
        if self.planning._task is None:
            return
        next_one = asyncio.create_task(self.planner.asked.get())
        await asyncio.wait({self.planning._task, next_one}, return_when=asyncio.FIRST_COMPLETED)
        if next_one.done():
            self.planner.asked.put_nowait(next_one.result())
        else:
            next_one.cancel()


async def test_a_small_pool_is_not_planned() -> None:
    scene = Scene()
    scene.given(LEAST_ROWS - 1)
    assert scene.planning._task is None


async def test_a_large_job_is_planned_and_the_engine_follows() -> None:
    scene = Scene()
    scene.given(LEAST_ROWS)
    request = await scene.answered()
    assert scene.link.sent == [PLAN]
    assert (request.order, request.token_s, request.kv_token_s) == ("ends", 1e-4, 1e-7)
    assert (request.kv_tokens, request.unit_tokens) == (READY.num_blocks * READY.block_size, READY.block_size)
    assert [job.num_rows for job in request.jobs] == [LEAST_ROWS]


async def test_it_is_planned_again_when_it_has_grown_by_a_tenth() -> None:
    scene = Scene()
    scene.given(100_000)
    await scene.answered()
    scene.given(int(GROWTH * 100_000) - 1)
    assert scene.planning._task is None
    scene.given(1)
    await scene.answered()
    assert scene.link.sent == [PLAN, PLAN]


async def test_what_comes_while_a_plan_is_made_is_planned_next() -> None:
    scene = Scene()
    scene.given(LEAST_ROWS)
    await scene.planner.asked.get()
    scene.given(LEAST_ROWS)
    scene.planner.answers.put_nowait(PLAN)
    assert [job.num_rows for job in (await scene.answered()).jobs] == [2 * LEAST_ROWS]


async def test_no_plan_costs_nothing_but_the_plan() -> None:
    scene = Scene()
    scene.given(LEAST_ROWS)
    await scene.answered(None)
    assert scene.link.sent == []
    scene.given(LEAST_ROWS)
    await scene.answered()
    assert scene.link.sent == [PLAN]


async def test_a_new_engine_is_not_told_the_plan_for_the_old_one() -> None:
    scene = Scene()
    scene.given(LEAST_ROWS)
    await scene.planner.asked.get()
    scene.client.detach()
    scene.client.attach(scene.link, msgspec.structs.replace(FOLLOWS))
    scene.planning.engine_is_new()
    scene.planning.grown(LEAST_ROWS)
    scene.planner.answers.put_nowait(PLAN)
    await scene.answered()
    assert scene.link.sent == [PLAN]


async def test_an_engine_that_follows_no_plan_is_not_planned_for() -> None:
    scene = Scene(READY)
    scene.given(LEAST_ROWS)
    await scene.settled()
    assert scene.planning._task is None
    assert scene.planner.asked.empty()


async def test_stopping_ends_what_is_being_planned(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.given(LEAST_ROWS)
    await scene.planner.asked.get()
    await scene.planning.stop()
    assert scene.planning._task is None
    assert not caplog.records


async def test_it_is_planned_again_with_what_answers_have_told() -> None:
    scene = Scene()
    scene.given(LEAST_ROWS)
    await scene.answered()
    assert scene.planning._task is None
    scene.planning.ended(1)
    await scene.answered()
    assert scene.link.sent == [PLAN, PLAN]


async def test_not_before_its_time() -> None:
    scene = Scene(period_s=1e-6)
    scene.given(LEAST_ROWS)
    await scene.answered()
    await until(lambda: scene.planning._task is None)
    scene.planning.ended(1)
    assert scene.planning._task is None
    scene.now_s = 1e-6
    scene.planning.ended(1)
    assert scene.planning._task is not None
    await scene.answered()
    assert scene.link.sent == [PLAN, PLAN]


async def test_the_planner_is_told_how_far_answers_are_that_run() -> None:
    scene = Scene()
    running = packed([3, 7]), packed([40, 50])
    outlooks = [BatchDeadlineStatus(name, DeadlineStatus.ON_TIME, 1.0, None, 2.0, *running) for name in ("job", "gone")]
    scene.client.on_message(StepOutputs([], [], outlooks))
    scene.given(LEAST_ROWS)
    ((job,),) = ((await scene.answered()).jobs,)
    assert (job.running_rows, job.running_tokens) == running
    assert job.num_rows == LEAST_ROWS


async def test_what_ran_in_an_engine_that_has_gone_is_forgotten() -> None:
    scene = Scene()
    outlook = BatchDeadlineStatus("job", DeadlineStatus.ON_TIME, 1.0, None, 2.0, packed([3]), packed([40]))
    scene.client.on_message(StepOutputs([], [], [outlook]))
    scene.client.detach()
    scene.client.attach(scene.link, FOLLOWS)
    scene.planning.engine_is_new()
    scene.given(LEAST_ROWS)
    assert (await scene.answered()).jobs[0].running_rows == b""

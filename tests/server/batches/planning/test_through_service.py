"""Batches whose pool is planned: what the planner is told of them, and what the engine is."""

import asyncio
from pathlib import Path

import msgspec

from neaptide.engine.messages import PlanReady
from neaptide.launch.planner import made
from neaptide.server.batches.planning.request import PlanRequest, unpacked
from tests.patience import until
from tests.server.batches.fakes import READY, Server, jsonl, line

FOLLOWS = msgspec.structs.replace(READY, planned_order="neaptide", token_s=1e-4, kv_token_s=1e-7)


class PlansHere:
    """In a thread of this process: no child to be started."""

    def __init__(self) -> None:
        self.asked: list[PlanRequest] = []

    async def plan(self, request: PlanRequest) -> PlanReady | None:
        self.asked.append(request)
        return await asyncio.to_thread(made, request)


def plans_of(server: Server) -> list[PlanReady]:
    return [message for message in server.engine.sent if isinstance(message, PlanReady)]


async def test_the_rows_of_a_batch_are_planned_and_its_engine_follows(tmp_path: Path) -> None:
    planner = PlansHere()
    async with Server(tmp_path, planner=planner, ready=FOLLOWS) as server:
        batch = await server.create(jsonl([line(f"c{i}", f"{i % 7} and more", max_tokens=9) for i in range(600)]))
        await server.until_given(batch.id)
        await until(lambda: bool(plans_of(server)))
        plans = plans_of(server)
        server.engine.answer(batch.id)
        assert (await server.until_terminal(batch.id)).status == "completed"
    ((job,),) = (request.jobs for request in planner.asked)
    assert (job.batch_id, job.num_rows) == (batch.id, 600)
    assert unpacked(job.rows).tolist() == list(range(600))
    assert set(unpacked(job.limits).tolist()) == {9}
    assert plans[0].batch_ids == [batch.id]
    assert sorted(unpacked(plans[0].rows).tolist()) == list(range(600))


async def test_lines_that_have_ended_tell_how_long_answers_are(tmp_path: Path) -> None:
    planner = PlansHere()
    async with Server(tmp_path, planner=planner, ready=FOLLOWS) as server:
        batch = await server.create(jsonl([line(f"c{i}", max_tokens=99) for i in range(600)]))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 100)
        (running,) = server.service._machine._runner._jobs.values()
        await until(lambda: len(unpacked(running.job.left(tmp_path).rows)) == 500)
        left = running.job.left(tmp_path)
    assert unpacked(left.ended_rows).tolist() == list(range(100))
    assert min(unpacked(left.ended_tokens)) > 0

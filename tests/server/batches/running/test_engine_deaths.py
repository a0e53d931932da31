"""Engines that die, with and without batch lines in their last step, and batches that are taken from them."""

import asyncio
from pathlib import Path

import pytest

from neaptide.engine.messages import AddBatch, AddRequest, RequestOutput, ToEngine
from neaptide.engine.params import SamplingParams, Tier
from neaptide.server.batches.storing import batch_rows
from neaptide.server.batches.storing.store import StoreUnavailableError
from neaptide.server.engine_client.client import EngineUnavailableError
from neaptide.server.engine_client.deaths import Evidence
from tests.server.batches.fakes import Server, jsonl, line, numbered, output


async def test_a_lost_engine_costs_only_what_it_had_not_finished(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(6))
        await server.until_given(batch.id)
        first = server.engine
        first.answer(batch.id, 2)
        second = server.new_engine()
        await server.until_given(batch.id)
        assert second.added(batch.id) == [[2, 3, 4, 5]]
        second.answer(batch.id)
        server.results(await server.until_status(batch.id, "completed"))
        assert sorted(first.executed + second.executed) == sorted(f"{batch.id}:{row}" for row in range(6))


async def test_what_a_dead_engine_said_of_a_line_is_forgotten(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("c0", stop="\u2603")]))
        await server.until_given(batch.id)
        server.engine.say([output(batch.id, 0, b"half an ans")])
        server.new_engine()
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert found["c0"]["response"]["body"]["choices"][0]["text"] == "text of c0"[::-1]


async def test_batches_wait_for_the_engine(tmp_path: Path) -> None:
    async with Server(tmp_path, engine=False) as server:
        batch = await server.create(numbered(2))
        await server.until_status(batch.id, "in_progress")
        server.engine.auto = True
        server.new_engine().auto = True
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        server.results(await server.until_status(batch.id, "completed"))


async def test_a_batch_taken_back_goes_on_where_it_was_and_no_half_answer_is_kept(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(jsonl([line("c0"), line("c1", stop="\u2603")]))
        await server.until_given(batch.id)
        engine = server.engine
        engine.answer(batch.id, 1)
        engine.say([output(batch.id, 1, [0])])
        runner = server.service._machine._runner
        runner._take_back()  # as for a disk that refuses, until it takes results again
        assert engine.waiting == {}
        runner.engine_is_empty()
        await server.until_given(batch.id, 2)
        assert engine.added(batch.id) == [[0, 1], [1]]
        engine.answer(batch.id)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert found["c1"]["response"]["body"]["choices"][0]["text"] == "text of c1"[::-1]


async def test_a_suspended_batch_leaves_the_engine_and_goes_on_at_the_next_start(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(3))
        await server.until_given(batch.id)
        server.service.suspend()
        assert server.engine.waiting == {}
        engine = server.new_engine()
        await server.service._machine._runner.close_job("another")  # its turn comes after the news of the engine
        assert engine.waiting == {}
    async with Server(tmp_path) as again:
        await again.until_given(batch.id)
        again.engine.answer(batch.id)
        await again.until_status(batch.id, "completed")


@pytest.mark.acceptance("A3", "a line that three engines die of, the last time alone")
async def test_a_line_that_kills_alone_is_quarantined_alone(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(5))
        await server.until_given(batch.id)
        second = server.new_engine([f"{batch.id}:{row}" for row in (0, 1, 2, 3)])
        await server.until_given(batch.id)
        assert second.added(batch.id) == [[0, 1, 4]]  # half of the suspects, beside those that are not suspected
        third = server.new_engine([f"{batch.id}:0", f"{batch.id}:1"])
        await server.until_given(batch.id)
        third.answer(batch.id)  # the first suspect, alone; then the other
        await server.until_given(batch.id, 2)
        assert third.added(batch.id) == [[0], [1]]
        last = server.new_engine([f"{batch.id}:1"])
        await server.until_given(batch.id)
        assert last.added(batch.id) == [[2, 3, 4]]
        last.answer(batch.id)
        found, errors = server.results(await server.until_status(batch.id, "completed"))
        assert list(found) == ["c0", "c2", "c3", "c4"]
        assert errors["c1"]["response"]["body"]["error"]["code"] == "engine_crash"


async def test_after_a_kill_from_outside_all_lines_run_beside_each_other(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(6))
        await server.until_given(batch.id)
        engine = server.new_engine([f"{batch.id}:{row}" for row in range(4)], Evidence.WEAK)
        await server.until_given(batch.id)
        assert engine.added(batch.id) == [list(range(6))]


async def test_the_second_half_of_the_suspects_follows_the_first(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(6))
        await server.until_given(batch.id)
        engine = server.new_engine([f"{batch.id}:{row}" for row in range(4)])
        await server.until_given(batch.id)
        engine.answer(batch.id, 2)
        await server.until_given(batch.id, 2)
        assert engine.added(batch.id) == [[0, 1, 4, 5], [2, 3]]


async def test_a_suspect_of_one_batch_holds_back_the_other_until_it_has_run_alone(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        suspect = await server.create(numbered(2))
        other = await server.create(numbered(2))
        for batch in (suspect, other):
            await server.until_given(batch.id)
        engine = server.new_engine([f"{suspect.id}:1"])
        await server.until_given(suspect.id)
        assert (engine.added(suspect.id), engine.added(other.id)) == ([[1]], [])
        engine.answer(suspect.id)
        await server.until_given(other.id)
        assert (engine.added(suspect.id), engine.added(other.id)) == ([[1], [0]], [[0, 1]])


async def test_a_cancelled_suspect_holds_nobody_back(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        suspect = await server.create(numbered(1))
        other = await server.create(numbered(2))
        for batch in (suspect, other):
            await server.until_given(batch.id)
        engine = server.new_engine([f"{suspect.id}:0"])
        await server.until_given(suspect.id)
        await server.service.cancel_batch(suspect.id, "")
        await server.until_given(other.id)
        assert engine.added(other.id) == [[0, 1]]


@pytest.mark.parametrize("stranger", ["unknown:3", "0"])
async def test_a_line_is_not_convicted_beside_rows_that_have_ended(tmp_path: Path, stranger: str) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2))
        await server.until_given(batch.id)
        server.engine.answer(batch.id, 1)
        in_step = [stranger if ":" in stranger else f"{batch.id}:{stranger}", f"{batch.id}:1"]
        for _ in range(3):
            engine = server.new_engine(in_step)
            await server.until_given(batch.id)
        engine.answer(batch.id)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert list(found) == ["c0", "c1"]


async def test_an_engine_that_comes_while_rows_are_given_out_gets_them_anew(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        first = server.engine
        take = first.send

        def take_and_die(message: ToEngine) -> None:
            take(message)
            if isinstance(message, AddBatch):
                # In the next round of the loop, before the runner asks whether there is more to give.
                asyncio.get_running_loop().call_soon(server.new_engine, [f"{message.batch_id}:0"])

        first.send = take_and_die  # type: ignore[method-assign]
        batch = await server.create(numbered(3))
        await server.until(batch.id, lambda _: server.engine is not first)
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        await server.until_given(batch.id, 2)
        assert server.engine.added(batch.id) == [[0], [1, 2]]


async def test_suspects_are_remembered_after_a_restart(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(6))
        await server.until_given(batch.id)
        server.new_engine([f"{batch.id}:{row}" for row in (0, 1, 2, 3)])
        await server.until_given(batch.id)
        server.new_engine([f"{batch.id}:{row}" for row in (0, 1)])
        await server.until_given(batch.id)
    async with Server(tmp_path) as again:
        for count in (1, 2, 3):
            await again.until_given(batch.id, count)
            again.engine.answer(batch.id)
        # Lines of two deaths run alone, as they would have without the restart.
        assert again.engine.added(batch.id) == [[0], [1], [2, 3, 4, 5]]
        found, _ = again.results(await again.until_status(batch.id, "completed"))
        assert list(found) == [f"c{i}" for i in range(6)]


async def test_a_death_counts_while_the_disk_refuses_to_note_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        write = server.service.store.write

        async def write_but_no_attempts(operation: object, *args: object) -> object:
            if operation is batch_rows.count_attempts:
                raise StoreUnavailableError("database or disk is full")
            return await write(operation, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(server.service.store, "write", write_but_no_attempts)
        batch = await server.create(numbered(1))
        await server.until_given(batch.id)
        server.new_engine([f"{batch.id}:0"])
        await server.until_given(batch.id)
        server.new_engine([f"{batch.id}:0"])
        _, errors = server.results(await server.until_status(batch.id, "completed"))
        assert errors["c0"]["response"]["body"]["error"]["code"] == "engine_crash"


# ---- beside online requests -----------------------------------------------------------------------------


async def die_beside_online(server: Server, batch_id: str, *, answered: bool) -> None:
    """The engine dies in a step of the batch's first row and of an online request, which has answered or not."""
    params = SamplingParams(max_tokens=9)
    stream = server.client.generate(AddRequest("chat-0", [7], params, Tier.DEFAULT, 0.0, 1.0, 1.0))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert server.client.num_in_flight == 1
    if answered:
        server.engine.say([RequestOutput("chat-0", [7])])
        await first
        first = asyncio.ensure_future(anext(stream))
    server.new_engine(["chat-0", f"{batch_id}:0"])
    with pytest.raises(EngineUnavailableError) as lost:
        await first
    assert lost.value.may_have_caused_it is not answered


async def test_deaths_in_the_first_step_of_an_online_request_do_not_count(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(2))
        for _ in range(3):
            await server.until_given(batch.id)
            await die_beside_online(server, batch.id, answered=False)
        await server.until_given(batch.id)
        server.engine.answer(batch.id)
        await server.until_given(batch.id, 2)
        assert server.engine.added(batch.id) == [[0], [1]]  # a suspect all the same
        server.engine.answer(batch.id)
        found, _ = server.results(await server.until_status(batch.id, "completed"))
        assert list(found) == ["c0", "c1"]


async def test_deaths_beside_an_online_request_that_had_answered_count(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(1))
        for _ in range(2):
            await server.until_given(batch.id)
            await die_beside_online(server, batch.id, answered=True)
        _, errors = server.results(await server.until_status(batch.id, "completed"))
        assert errors["c0"]["response"]["body"]["error"]["code"] == "engine_crash"

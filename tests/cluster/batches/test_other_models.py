"""Servers of several models on one database, as during a roll to a new one: each batch is answered by the model that
its lines name, and by the one of that name which has begun with it."""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from neaptide.cluster.batches.state_machine import SharedStateMachine
from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.batches.storing.tables import files
from tests.cluster.batches.pair import answer_all, answered_to_the_end, machine_of, shared_server
from tests.patience import until
from tests.server.batches.fakes import FakeClock, Server, jsonl, line, numbered

NEW = {"fingerprint": "new", "names": ("new",)}
NUM_LINES = 5


def of_new(count: int = NUM_LINES) -> bytes:
    return jsonl(line(f"c{n}", model="new") for n in range(count))


def executed(server: Server, batch: BatchRecord) -> int:
    return sum(name.startswith(batch.id) for name in server.engine.executed)


async def several_looks(*servers: Server) -> None:
    """Each has looked for batches to check, and for chunks, some times more."""
    for server in servers:
        machine = machine_of(server)
        for _ in range(3):
            machine._wake.set()
            machine.chunks.wake()
            await asyncio.sleep(0.02)


async def waits_for(server: Server, batch: BatchRecord) -> str | None:
    (shown,) = await server.service.shown(await server.get(batch.id))
    return None if shown["neaptide"] is None else shown["neaptide"]["waits_for"]


@pytest.mark.parametrize("is_known", [True, False], ids=["noted at the upload", "found at the check"])
async def test_each_batch_is_answered_by_the_model_that_it_names_whoever_creates_it(
    tmp_path: Path, postgres_url: str, is_known: bool
) -> None:
    async with shared_server(tmp_path, "a", postgres_url) as a, shared_server(tmp_path, "b", postgres_url, **NEW) as b:
        batches = []
        for creator, content in ((a, numbered(NUM_LINES)), (a, of_new()), (b, numbered(NUM_LINES)), (b, of_new())):
            file = await creator.upload(content)
            if not is_known:  # as of an earlier version
                await creator.service.store.write(forget_model, file.id)
            batches.append(await creator.create(input_file_id=file.id))
        records = [await answered_to_the_end([a, b], batch.id) for batch in batches]
        assert [(record.status, record.num_completed) for record in records] == [("completed", NUM_LINES)] * 4
        assert [executed(a, batch) for batch in batches] == [NUM_LINES, 0, NUM_LINES, 0]
        assert [executed(b, batch) for batch in batches] == [0, NUM_LINES, 0, NUM_LINES]


def forget_model(conn: sa.Connection, file_id: str) -> None:
    conn.execute(files.update().where(files.c.id == file_id).values(model=None))


async def test_a_batch_of_a_model_that_nobody_serves_yet_waits_and_says_so(tmp_path: Path, postgres_url: str) -> None:
    async with shared_server(tmp_path, "a", postgres_url) as a:
        batch = await a.create(of_new())
        await several_looks(a)
        assert (await a.get(batch.id)).status == "validating"
        assert await waits_for(a, batch) == "No server serves a model of the name 'new'."
        async with shared_server(tmp_path, "b", postgres_url, **NEW) as b:
            assert await waits_for(a, batch) is None
            assert (await answered_to_the_end([a, b], batch.id)).num_completed == NUM_LINES
            assert a.engine.executed == []


async def test_it_fails_as_not_found_when_its_window_is_over(tmp_path: Path, postgres_url: str) -> None:
    clock = FakeClock()
    async with shared_server(tmp_path, "a", postgres_url, clock=clock) as a:
        batch = await a.create(of_new(), completion_window="1h")
        clock.now_s += 3_599
        await a.service.expire_overdue()
        assert (await a.get(batch.id)).status == "validating"
        clock.now_s += 1
        await a.service.expire_overdue()
        record = await a.get(batch.id)
    assert (record.status, record.failed_at) == ("failed", batch.expires_at)
    assert record.errors == [
        {
            "code": "model_not_found",
            "line": None,
            "message": "No server has served a model of the name 'new' within the completion window.",
            "param": "body.model",
        }
    ]


async def test_a_file_with_lines_of_two_models_fails_at_once(tmp_path: Path, postgres_url: str) -> None:
    async with shared_server(tmp_path, "a", postgres_url) as a:
        batch = await a.create(jsonl([line("mine"), line("other", model="new")]))
        record = await a.until_terminal(batch.id)
    assert record.status == "failed"
    assert [(error["line"], error["code"]) for error in record.errors or []] == [(2, "model_not_found")]


async def test_of_two_models_of_one_name_the_creators_answers_whoever_looks_first(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The creator is gone before it could check the file; the other one leaves the batch alone, and says why."""
    async with shared_server(tmp_path, "b", postgres_url, fingerprint="other") as b:
        with monkeypatch.context() as hanging:
            async with shared_server(tmp_path, "a", postgres_url) as a:
                hanging.setattr(SharedStateMachine, "_lease_batch", no_batch)
                batch = await a.create(numbered(NUM_LINES))
        await several_looks(b)
        record = await b.get(batch.id)
        assert (record.status, record.model, record.model_fingerprint) == ("validating", "m", "fake")
        assert await waits_for(b, batch) == "No server has the model 'm' for which the batch was made."
        own = await b.create(numbered(1))
        assert (await answered_to_the_end([b], own.id)).num_completed == 1
        async with shared_server(tmp_path, "a", postgres_url) as a:
            assert (await answered_to_the_end([a, b], batch.id)).num_completed == NUM_LINES
            assert (executed(a, batch), executed(b, batch)) == (NUM_LINES, 0)


async def no_batch(*_: object) -> None:
    return None


async def test_who_begins_with_a_batch_of_an_unknown_creator_answers_it_to_the_end(
    tmp_path: Path, postgres_url: str
) -> None:
    """Created by a server of another name; of the two that have the name, the first to look takes it for good."""
    async with shared_server(tmp_path, "a", postgres_url) as a:
        batch = await a.create(of_new())
        async with shared_server(tmp_path, "b", postgres_url, engine=False, **NEW) as b:
            await b.until_status(batch.id, "in_progress")
        async with shared_server(tmp_path, "c", postgres_url, fingerprint="newer", names=("new",)) as c:
            await several_looks(c)
            assert c.engine.sent == []
            async with shared_server(tmp_path, "b", postgres_url, **NEW) as b:

                async def has_ended() -> bool:
                    answer_all(b, batch.id)
                    return (await b.get(batch.id)).is_terminal

                await until(has_ended)
                assert ((await b.get(batch.id)).num_completed, executed(c, batch)) == (NUM_LINES, 0)

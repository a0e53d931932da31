"""Two servers that are not quite alike: another version, a shorter context, a fault of its own. No line pays for it."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from neaptide.cluster.batches import leased_batch, leased_chunks
from neaptide.cluster.storage.blobs import Blobs
from neaptide.server.batches.lines import CompiledLine
from neaptide.server.batches.storing.models import BatchStatus
from neaptide.server.batches.storing.tables import servers
from neaptide.server.http.errors import InvalidRequestError
from tests.cluster.batches.pair import (
    answer_all,
    answered_to_the_end,
    executed,
    let_lease_end,
    machine_of,
    results,
    shared_server,
    stop_leasing,
)
from tests.patience import PATIENCE_S, until
from tests.server.batches.fake_compiler import FakeCompiler
from tests.server.batches.fakes import READY, FakeClock, Server, ThreadChecker, jsonl, line, numbered

NUM_LINES = 20


class OlderCompiler(FakeCompiler):
    """Refuses what a newer one takes, so that the rows behind it have other numbers."""

    def compile(self, endpoint: str, body: dict[str, Any]) -> CompiledLine:
        if body["messages"][-1]["content"] == "text of c3":
            raise InvalidRequestError("Unknown.", param="messages", code="invalid_value")
        return super().compile(endpoint, body)


async def test_a_plan_of_a_check_that_another_server_has_overtaken_is_not_run(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first server has checked still lies where its copy of the batch's plan would."""
    overtaken, checked, put = threading.Event(), asyncio.Event(), leased_batch.put_plan
    loop = asyncio.get_running_loop()

    def put_late(blobs: Blobs, stem: Path, key: str) -> None:
        if stem.parent.parent.name == "a":
            loop.call_soon_threadsafe(checked.set)
            assert overtaken.wait(PATIENCE_S)
        put(blobs, stem, key)

    monkeypatch.setattr(leased_batch, "put_plan", put_late)
    async with shared_server(tmp_path, "a", postgres_url) as a:
        batch = await a.create(numbered(NUM_LINES))
        await checked.wait()
        async with shared_server(tmp_path, "b", postgres_url, checker=ThreadChecker(OlderCompiler())) as b:
            await stop_leasing(b)
            await let_lease_end(b)
            await b.until_status(batch.id, BatchStatus.IN_PROGRESS)
            overtaken.set()
            record = await answered_to_the_end([a], batch.id)
            output, errors = await results(b, record)
    texts = {name: one["response"]["body"]["choices"][0]["text"] for name, one in output.items()}
    # The fake engine answers with the prompt backwards.
    assert texts == {f"c{n}": f"text of c{n}"[::-1] for n in range(NUM_LINES) if n != 3}
    assert list(errors) == ["c3"]


SHORT, LONG = 100, 1_000
LINES = jsonl(
    [line(f"short{n}", "four") for n in range(NUM_LINES)]
    + [line(f"long{n}", "x" * 300) for n in range(NUM_LINES)]
    + [line(f"wordy{n}", "four", max_tokens=200) for n in range(NUM_LINES)]
)
"""Short ones for either context; prompts, and answers, that only the longer one holds."""


@pytest.mark.parametrize("checker", ["short", "long"])
async def test_lines_that_are_too_long_for_a_server_are_left_to_one_with_a_longer_context(
    tmp_path: Path, postgres_url: str, checker: str
) -> None:
    """Whichever of the two checks the file; the other one has no engine as yet."""
    async with (
        shared_server(tmp_path, "short", postgres_url, engine=False, max_model_len=SHORT) as short,
        shared_server(tmp_path, "long", postgres_url, engine=False, max_model_len=LONG) as long,
    ):
        checks, rests = (short, long) if checker == "short" else (long, short)
        machine_of(rests)._cares = dict.fromkeys(map(str, range(4)))  # type: ignore[arg-type]
        batch = await checks.create(LINES)
        await checks.until_status(batch.id, BatchStatus.IN_PROGRESS)
        machine_of(rests)._cares = {}
        short.client.attach(short.engine, READY)
        await until(lambda: answered(short, batch.id) == NUM_LINES)
        long.client.attach(long.engine, READY)
        record = await answered_to_the_end([long, short], batch.id)
        output, errors = await results(long, record)
        assert (len(output), errors) == (3 * NUM_LINES, {})
        assert (len(executed(short.engine)), len(executed(long.engine))) == (NUM_LINES, 2 * NUM_LINES)


def answered(server: Server, batch_id: str) -> int:
    answer_all(server, batch_id)
    return len(executed(server.engine))


async def test_a_line_that_no_known_server_can_run_fails_at_the_check(tmp_path: Path, postgres_url: str) -> None:
    async with shared_server(tmp_path, "short", postgres_url, max_model_len=SHORT) as short:
        batch = await short.create(jsonl([line("short", "four"), line("long", "x" * 300), line("longer", "x" * 2_000)]))
        _, errors = await results(short, await answered_to_the_end([short], batch.id))
        assert sorted(errors) == ["long", "longer"]
        assert "context holds 100" in errors["long"]["response"]["body"]["error"]["message"]
        async with shared_server(tmp_path, "long", postgres_url, max_model_len=LONG) as long:
            batch = await short.create(jsonl([line("long", "x" * 300), line("longer", "x" * 2_000)]))
            output, errors = await results(short, await answered_to_the_end([short, long], batch.id))
    assert (list(output), list(errors)) == (["long"], ["longer"])
    assert "context holds 1000" in errors["longer"]["response"]["body"]["error"]["message"]


async def test_lines_whose_server_does_not_come_back_expire_and_say_for_what_they_waited(
    tmp_path: Path, postgres_url: str
) -> None:
    clock = FakeClock()
    why = "Lines need a context of up to 316 tokens; the longest here is 100."
    async with shared_server(tmp_path, "short", postgres_url, clock=clock, max_model_len=SHORT) as short:
        async with shared_server(tmp_path, "long", postgres_url, engine=False, max_model_len=LONG):
            pass
        batch = await short.create(jsonl([line("short", "four"), line("long", "x" * 300)]), completion_window="1h")
        await until(lambda: answered(short, batch.id) == 1)
        (shown,) = await short.service.shown(await short.get(batch.id))
        assert shown["neaptide"] is not None
        assert (shown["status"], shown["neaptide"]["waits_for"]) == ("in_progress", why)
        clock.now_s += 3_600
        record = await short.until_status(batch.id, BatchStatus.EXPIRED)
        output, errors = await results(short, record)
    assert list(output) == ["short"]
    assert errors["long"]["error"]["code"] == "batch_expired"
    assert errors["long"]["error"]["message"].endswith(f"window expired. {why}")


async def test_a_lost_plan_is_made_again_only_by_a_server_that_can_run_all_of_it(
    tmp_path: Path, postgres_url: str
) -> None:
    """The short one would make one without the long lines, which nobody could run then."""
    async with shared_server(tmp_path, "short", postgres_url, engine=False, max_model_len=SHORT):
        pass  # known from now on
    async with shared_server(tmp_path, "long", postgres_url, engine=False, max_model_len=LONG) as long:
        batch = await long.create(LINES)
        await long.until_status(batch.id, BatchStatus.IN_PROGRESS)
    for path in (tmp_path / "blobs" / batch.id).iterdir():
        path.unlink()
    for path in (tmp_path / "long" / "jobs").iterdir():
        path.unlink()
    async with shared_server(tmp_path, "short", postgres_url, engine=False, max_model_len=SHORT) as short:
        await short.service.store.write(forget_others, machine_of(short).chunks.server.name)
        short.client.attach(short.engine, READY)
        await until(lambda: len(machine_of(short).chunks._passed_by._chunks) == 1)
        assert list((tmp_path / "blobs" / batch.id).iterdir()) == []
        async with shared_server(tmp_path, "long", postgres_url, max_model_len=LONG) as long:
            record = await answered_to_the_end([long, short], batch.id)
            output, errors = await results(long, record)
    assert (len(output), errors) == (3 * NUM_LINES, {})


def forget_others(conn: sa.Connection, name: str) -> None:
    conn.execute(servers.delete().where(servers.c.name != name))


async def test_a_chunk_that_a_server_cannot_take_up_for_no_known_reason_is_left_to_others(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with what else there is, and holds nothing."""
    async with shared_server(tmp_path, "a", postgres_url, engine=False) as a:
        bad = await a.create(numbered(NUM_LINES), completion_window="1h")
        await a.until_status(bad.id, BatchStatus.IN_PROGRESS)
        good = await a.create(numbered(NUM_LINES))
        await a.until_status(good.id, BatchStatus.IN_PROGRESS)
        work_of = leased_chunks.work_of

        def fails_at_first(lines: Any, plan: Any, tokens: Any, device: Any) -> Any:
            if Path(tokens.stem).name == bad.id:
                raise IndexError("list index out of range")
            return work_of(lines, plan, tokens, device)

        with monkeypatch.context() as failing:
            failing.setattr(leased_chunks, "work_of", fails_at_first)
            a.client.attach(a.engine, READY)
            assert (await answered_to_the_end([a], good.id)).num_completed == NUM_LINES
        async with shared_server(tmp_path, "b", postgres_url) as b:
            assert (await answered_to_the_end([a, b], bad.id)).num_completed == NUM_LINES
            assert len(executed(b.engine)) == NUM_LINES

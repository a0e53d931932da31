"""Two servers that are not quite alike: another version, a shorter context, a fault of its own. No line pays for it."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from neaptide.server.batches.lines import CompiledLine
from neaptide.server.batches.sharing import claimer, leased, passed_by
from neaptide.server.batches.storing.models import BatchStatus
from neaptide.server.batches.storing.shared.blobs import Blobs
from neaptide.server.edge.errors import InvalidRequestError
from tests.patience import PATIENCE_S, until
from tests.server.batches.fake_compiler import FakeCompiler
from tests.server.batches.fakes import READY, ThreadChecker, jsonl, line, numbered
from tests.server.batches.sharing.pair import (
    answer_all,
    answered_to_the_end,
    executed,
    let_lease_end,
    machine_of,
    shared_server,
)

NUM_LINES = 20
NUM_TOO_LONG = 150
"""Three chunks of lines."""


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
    overtaken, checked, put = threading.Event(), asyncio.Event(), leased.put_plan
    loop = asyncio.get_running_loop()

    def put_late(blobs: Blobs, stem: Path, key: str) -> None:
        if stem.parent.parent.name == "a":
            loop.call_soon_threadsafe(checked.set)
            assert overtaken.wait(PATIENCE_S)
        put(blobs, stem, key)

    monkeypatch.setattr(leased, "put_plan", put_late)
    async with shared_server(tmp_path, "a", postgres_url) as a:
        batch = await a.create(numbered(NUM_LINES))
        await checked.wait()
        async with shared_server(tmp_path, "b", postgres_url, checker=ThreadChecker(OlderCompiler())) as b:
            machine_of(b).claimer._is_suspended = True
            await let_lease_end(b)
            await b.until_status(batch.id, BatchStatus.IN_PROGRESS)
            overtaken.set()
            record = await answered_to_the_end([a], batch.id)
            for file_id in (record.output_file_id, record.error_file_id):
                await b.service.files.verify(await b.service.files.get(str(file_id), ""))
            output, errors = b.results(record)
    texts = {name: one["response"]["body"]["choices"][0]["text"] for name, one in output.items()}
    # The fake engine answers with the prompt backwards.
    assert texts == {f"c{n}": f"text of c{n}"[::-1] for n in range(NUM_LINES) if n != 3}
    assert list(errors) == ["c3"]


async def test_lines_that_are_too_long_for_a_server_are_left_to_one_with_a_longer_context(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two keys' batches the one that is due first has them in each chunk: the other one is run meanwhile."""
    monkeypatch.setattr(passed_by, "MAX_CHUNKS", 2)
    short = msgspec.structs.replace(READY, max_model_len=100)
    async with shared_server(tmp_path, "long", postgres_url, engine=False) as long:
        lines = jsonl(line(f"c{n}", max_tokens=90) for n in range(NUM_TOO_LONG))
        too_long = await long.create(lines, completion_window="1h")
        await long.until_status(too_long.id, BatchStatus.IN_PROGRESS)
        async with shared_server(tmp_path, "short", postgres_url, ready=short) as b:
            other = await b.create(numbered(NUM_LINES), owner="another")

            async def has_ended() -> bool:
                answer_all(b, other.id)
                return (await b.get(other.id, "another")).is_terminal

            await until(has_ended)
            assert (await b.get(other.id, "another")).num_completed == NUM_LINES
            assert [name for name in b.engine.executed if name.startswith(too_long.id)] == []
            long.client.attach(long.engine, READY)
            record = await answered_to_the_end([long, b], too_long.id)
    assert (record.num_completed, record.num_failed) == (NUM_TOO_LONG, 0)
    assert len(executed(long.engine)) == NUM_TOO_LONG


async def test_a_chunk_that_a_server_cannot_take_up_for_no_known_reason_is_left_to_others(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with what else there is, and holds nothing."""
    async with shared_server(tmp_path, "a", postgres_url, engine=False) as a:
        bad = await a.create(numbered(NUM_LINES), completion_window="1h")
        await a.until_status(bad.id, BatchStatus.IN_PROGRESS)
        good = await a.create(numbered(NUM_LINES))
        await a.until_status(good.id, BatchStatus.IN_PROGRESS)
        work_of = claimer.work_of

        def fails_at_first(lines: Any, plan: Any, tokens: Any, device: Any) -> Any:
            if Path(tokens.stem).name == bad.id:
                raise IndexError("list index out of range")
            return work_of(lines, plan, tokens, device)

        with monkeypatch.context() as failing:
            failing.setattr(claimer, "work_of", fails_at_first)
            a.client.attach(a.engine, READY)
            assert (await answered_to_the_end([a], good.id)).num_completed == NUM_LINES
        async with shared_server(tmp_path, "b", postgres_url) as b:
            assert (await answered_to_the_end([a, b], bad.id)).num_completed == NUM_LINES
            assert len(executed(b.engine)) == NUM_LINES

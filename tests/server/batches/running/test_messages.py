"""A large batch reaches the engine in several messages."""

from pathlib import Path

import pytest

from neaptide.engine.messages import AddBatch
from tests.server.batches.fakes import Server, jsonl, line, numbered


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.batches.running.job.MESSAGE_ROWS", 4)


async def test_all_messages_come_one_after_another(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(10))
        await server.until_given(batch.id, messages=3)
        assert server.engine.added(batch.id) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        server.engine.answer(batch.id)
        record = await server.until_terminal(batch.id)
        assert server.engine.executed == [f"{batch.id}:{row}" for row in range(10)]
        assert len(server.results(record)[0]) == 10


async def test_a_new_engine_begins_with_the_first_line_that_has_not_ended(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        batch = await server.create(numbered(10))
        await server.until_given(batch.id, messages=3)
        server.engine.answer(batch.id, 3)
        engine = server.new_engine()
        await server.until_given(batch.id, messages=2)
        assert engine.added(batch.id) == [[3, 4, 5, 6], [7, 8, 9]]


async def test_a_message_carries_the_parameters_of_its_own_rows(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        lines = [line(f"c{i}", max_tokens=i + 1, **({"stop": "!"} if i % 3 == 0 else {})) for i in range(6)]
        batch = await server.create(jsonl(lines))
        await server.until_given(batch.id, messages=2)
        first, second = (message for message in server.engine.sent if isinstance(message, AddBatch))
        assert [first.params_table[i].max_tokens for i in first.params_index] == [1, 2, 3, 4]
        assert [second.params_table[i].max_tokens for i in second.params_index] == [5, 6]
        assert (len(second.params_table), first.stream_rows, second.stream_rows) == (2, [0, 3], [])

"""The order of events between batches that run at the same time."""

import asyncio
import threading
from pathlib import Path

import pytest

from neaptide.engine.params import FinishReason
from neaptide.server.batches.running.job import Heard, Job
from tests.patience import PATIENCE_S
from tests.server.batches.fakes import Server, jsonl, line, output


async def test_a_batch_that_ends_while_another_is_fed_costs_the_third_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server(tmp_path) as server:
        slow, ending, third = [(await server.create(jsonl([line("c", stop="!")]))).id for _ in range(3)]
        for batch_id in (slow, ending, third):
            await server.until_given(batch_id)
        loop, disk_takes, ended = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        store, runner, feed = server.service.store, server.service._machine._runner, Job.feed
        write_grouped, on_done = store.write_grouped, runner._on_done

        async def write_late(operation: object, rows: int) -> object:
            await disk_takes.wait()
            return await write_grouped(operation, rows)  # type: ignore[arg-type]

        def note_end(batch_id: str) -> None:
            on_done(batch_id)
            ended.set()

        def feed_until_ended(job: Job, heard: Heard) -> None:
            if job.batch_id == slow:
                loop.call_soon_threadsafe(disk_takes.set)
                assert ended.wait(PATIENCE_S)
            feed(job, heard)

        monkeypatch.setattr(store, "write_grouped", write_late)
        monkeypatch.setattr(runner, "_on_done", note_end)
        monkeypatch.setattr(Job, "feed", feed_until_ended)
        server.engine.say([output(ending, 0, b"!")])  # its line has ended; the engine does not know yet
        server.engine.say([output(batch_id, 0, b"x", FinishReason.STOP) for batch_id in (slow, ending, third)])
        for batch_id in (slow, ending, third):
            server.results(await server.until_status(batch_id, "completed"))

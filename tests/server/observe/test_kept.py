"""The API process keeps nothing of what has ended: as many objects and entries after many visits as after few."""

import asyncio
from pathlib import Path
from typing import Any

from tests.patience import until
from tests.server.batches import fakes
from tests.server.batches.fakes import jsonl, numbered
from tests.server.conftest import USER, Server
from tests.server.observe.kept import kept

ROUNDS = 4
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MALFORMED: tuple[tuple[str, str, bytes], ...] = (
    ("POST", CHAT, b""),
    ("POST", CHAT, b'{"messages": "hi"}'),
    ("POST", CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "model": "no-such-model"}'),
    ("POST", COMPLETIONS, b'{"prompt": "a", "n": 100000}'),
    ("GET", "/v1/no/such/route", b""),
    ("BREW", CHAT, b"{}"),
)


async def test_requests_leave_nothing_behind(server: Server) -> None:
    async def visit(number: int) -> None:
        chat: dict[str, Any] = {"model": "", "messages": USER, "max_tokens": 3, "seed": 1}
        for fields in ({}, {"stream": True}, {"n": 2, "service_tier": "flex"}, {"stream": True, "logprobs": True}):
            (await server.http.post(CHAT, json=chat | fields)).raise_for_status()
        for method, path, content in MALFORMED:
            reply = await server.http.request(method, f"{path}?visit={number}", content=content)
            assert 400 <= reply.status_code < 500
        server.engine.released.clear()
        gone = asyncio.create_task(server.http.post(CHAT, json=chat))
        await until(lambda: server.engine.num_running > 0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        server.engine.released.set()
        server.engine.emit_stats()
        for path in ("/metrics", "/dashboard", "/v1/models", "/health"):
            (await server.http.get(path)).raise_for_status()
        server.engine.received.clear()

    def found() -> dict[str, int]:
        # Kept for 15 minutes; test_history, why.test_endpoint and why.test_steps have their bounds.
        server.app.state.metrics.history._intervals.clear()
        server.app.state.why.requests._by_name.clear()
        server.app.state.why.requests._by_request_id.clear()
        server.app.state.why.steps._ended.clear()
        return kept(server.context, server.app.state.metrics)

    await visit(0)
    before = found()
    for number in range(1, ROUNDS):
        await visit(number)
    assert found() == before
    assert before["neaptide.server.engine_client.client.EngineClient._queues"] == 0
    assert before["prometheus_client.metrics.Histogram"] > 10


async def test_batches_leave_nothing_behind(tmp_path: Path) -> None:
    async with fakes.Server(tmp_path) as server:

        async def visit() -> None:
            worked_off, cancelled = [await server.create(numbered(3)) for _ in range(2)]
            refused = await server.create(jsonl(["{"]))
            for batch in (worked_off, cancelled):
                await server.until_given(batch.id)
            await server.service.cancel_batch(cancelled.id, "")
            server.engine.answer(worked_off.id)
            ended = [await server.until_terminal(batch.id) for batch in (worked_off, cancelled, refused)]
            assert {batch.status for batch in ended} == {"completed", "cancelled", "failed"}
            for batch in ended:
                for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                    if file_id is not None:
                        await server.service.files.delete(file_id, "")
            await server.keep_house()
            machine = server.service._machine
            await until(lambda: len(machine._background._tasks) == 2 and not machine._runner._tasks)  # upkeep, watch

        await visit()
        before = kept(server.service, server.client)
        for _ in range(1, ROUNDS):
            await visit()
        assert kept(server.service, server.client) == before
        assert before["neaptide.server.batches.running.job_runner.JobRunner._jobs"] == 0

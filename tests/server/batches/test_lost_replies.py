"""A reply that never arrives: the client asks again, and there is one object."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import openai
import pytest

from neaptide.server.batches.storing.models import BatchRecord
from neaptide.server.http.errors import ConflictError
from tests.server.batches.fakes import Server, numbered
from tests.server.batches.test_http import app_of
from tests.server.live import serving


class LosingProxy:
    """Passes requests on and, while ``losses`` last, hangs up instead of passing the reply back."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.losses = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        forward = asyncio.ensure_future(self._forward(reader, upstream_writer))
        with suppress(ConnectionError):
            while data := await upstream_reader.read(65536):
                if self.losses:
                    self.losses -= 1
                    break
                writer.write(data)
                await writer.drain()
        forward.cancel()
        await asyncio.gather(forward, return_exceptions=True)
        for end in (writer, upstream_writer):
            end.transport.abort()

    @staticmethod
    async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def proxied(server: Server) -> AsyncIterator[tuple[LosingProxy, openai.AsyncOpenAI]]:
    async with serving(app_of(server)) as live:
        proxy = LosingProxy(live.port)
        listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        base_url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        async with listener, openai.AsyncOpenAI(base_url=base_url, api_key="k", max_retries=3) as client:
            yield proxy, client


@pytest.mark.acceptance("A19", "replies to a create that are lost twice, over sockets, retried by the SDK", count=2)
async def test_the_sdk_retries_a_create_and_there_is_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    async with Server(tmp_path) as server, proxied(server) as (proxy, client):
        server.engine.auto = True
        file = await client.files.create(file=("in.jsonl", numbered(3)), purpose="batch")
        proxy.losses = 2
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            extra_headers={"Idempotency-Key": "one"},
        )
        assert proxy.losses == 0
        assert [entry.id async for entry in client.batches.list()] == [batch.id]
        server.results(await server.until_status(batch.id, "completed"))
        assert len(server.engine.executed) == 3


@pytest.mark.acceptance("A19", "a reply to an upload that is lost, over sockets, retried by the SDK")
async def test_the_sdk_retries_an_upload_and_there_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    async with Server(tmp_path) as server, proxied(server) as (proxy, client):
        proxy.losses = 1
        file = await client.files.create(
            file=("in.jsonl", numbered(3)), purpose="batch", extra_headers={"Idempotency-Key": "one"}
        )
        assert proxy.losses == 0
        assert [entry.id async for entry in client.files.list()] == [file.id]
        assert [path.name for path in (tmp_path / "files").iterdir()] == [file.id]


@pytest.mark.acceptance("A20", "two cancels at once against answers and finalizing, seeded", count=16)
async def test_two_cancels_at_once_against_the_end_of_a_batch(tmp_path: Path) -> None:
    async with Server(tmp_path) as server:
        for turns in range(16):
            batch = await server.create(numbered(4))
            await server.until_given(batch.id)
            server.engine.answer(batch.id, 4)
            for _ in range(turns * 4):
                await asyncio.sleep(0)
            cancels = [server.service.cancel_batch(batch.id, "") for _ in range(2)]
            outcomes = await asyncio.gather(*cancels, return_exceptions=True)
            assert all(isinstance(outcome, BatchRecord | ConflictError) for outcome in outcomes)
            cancelled = {isinstance(outcome, BatchRecord) for outcome in outcomes}
            assert len(cancelled) == 1, "one was told the opposite of the other"
            wanted = "cancelled" if cancelled == {True} else "completed"
            server.results(await server.until_status(batch.id, wanted))

"""Batches and their API while the database is silent, and afterwards."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import httpx2
import pytest

from neaptide.server.batches.running import finalize
from neaptide.server.batches.running.ending import NUM_WRITERS
from neaptide.server.batches.storing.models import BatchRecord, EndedLine
from neaptide.server.batches.storing.store import Store, StoreUnavailableError
from tests.cluster.batches.pair import answer_all, given, shared_server
from tests.cluster.storage.silence import SilentProxy
from tests.patience import PATIENCE_S, until
from tests.postgres import PostgresServer
from tests.server.batches.fakes import CHAT, Server, numbered
from tests.server.batches.test_http import app_of, http_client

NUM_LINES = 100
LIMIT_S = 0.5


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[SilentProxy]:
    with closing(SilentProxy(postgres_server)) as proxy:
        yield proxy


@pytest.fixture(params=["alone", "shared"])
def server(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    proxy: SilentProxy,
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Server:
    monkeypatch.setattr("neaptide.server.batches.storing.disk_patience.FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("neaptide.server.batches.running.job_runner.RETRY_DELAY_S", 0.01)
    url = proxy.url(postgres_server.new_database())
    if request.param == "shared":
        return shared_server(tmp_path, "a", url)
    return Server(tmp_path / "a", store_url=url)


@asynccontextmanager
async def silence(proxy: SilentProxy, server: Server) -> AsyncIterator[None]:
    store = server.service.store
    limit_s, store.limit_s = store.limit_s, LIMIT_S
    try:
        with proxy.silence():
            yield
    finally:
        store.limit_s = limit_s


async def answered(client: httpx2.AsyncClient, batch: BatchRecord) -> list[httpx2.Response]:
    """To every call that needs the database."""
    file, one = f"/v1/files/{batch.input_file_id}", f"/v1/batches/{batch.id}"
    body = {"input_file_id": batch.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    reads = [client.get(path) for path in (file, f"{file}/content", one, "/v1/files", "/v1/batches")]
    writes = [
        client.post("/v1/batches", json=body),
        client.post(f"{one}/cancel"),
        client.delete(file),
        client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"{}")}),
    ]
    return await asyncio.gather(*reads, *writes, *(client.get(file) for _ in range(20)))


async def test_calls_of_the_api_end_and_a_batch_goes_on_afterwards(server: Server, proxy: SilentProxy) -> None:
    async with server, http_client(app_of(server)) as client:
        batch = await server.create(numbered(NUM_LINES))
        await until(lambda: given(server, batch.id))
        async with silence(proxy, server):
            answer_all(server, batch.id)
            for reply in await answered(client, batch):
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_unavailable")
                assert int(reply.headers["retry-after"]) > 0
            assert server.service.storage_failing
        done = await to_the_end(server, batch.id)
        assert (done.status, done.num_completed) == ("completed", NUM_LINES)
        server.results(done)
        assert max(Counter(server.engine.executed).values()) == 1
        assert (await client.get(f"/v1/files/{done.output_file_id}/content")).status_code == 200
        await until(lambda: not server.service.storage_failing)


async def to_the_end(server: Server, batch_id: str) -> BatchRecord:
    while True:
        answer_all(server, batch_id)
        with suppress(StoreUnavailableError):
            if (record := await server.get(batch_id)).is_terminal:
                return record
        await asyncio.sleep(0.005)


async def test_reads_that_hang_keep_no_thread_of_other_work(server: Server, proxy: SilentProxy) -> None:
    """A chat, an upload's bytes and a batch's tokens are prepared in threads which there are few of."""
    async with server:
        async with silence(proxy, server):
            server.service.store.limit_s = 60.0
            hung = [asyncio.create_task(server.service.list_batches("", 10, None)) for _ in range(50)]
            assert await asyncio.gather(*(asyncio.to_thread(int, "7") for _ in range(50))) == [7] * 50
            assert not any(task.done() for task in hung)
        assert await asyncio.gather(*hung) == [([], False)] * 50


async def test_result_files_that_wait_for_the_database_keep_no_thread_of_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, waiting = threading.Event(), []
    lines_of = finalize.lines_of

    def late_lines(store: Store, batch_id: str) -> Iterator[EndedLine]:
        waiting.append(batch_id)
        goes_on.wait(PATIENCE_S)
        return lines_of(store, batch_id)

    monkeypatch.setattr(finalize, "lines_of", late_lines)
    async with Server(tmp_path) as server:
        server.engine.auto = True
        batches = [await server.create(numbered(1)) for _ in range(12)]
        await until(lambda: len(waiting) == NUM_WRITERS)
        assert await asyncio.gather(*(asyncio.to_thread(int, "7") for _ in range(50))) == [7] * 50
        goes_on.set()
        for batch in batches:
            assert (await server.until_terminal(batch.id)).status == "completed"

"""The whole app on a loop of its own, so that generated cases can come from a thread that knows no asyncio."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from fastapi import FastAPI

from neaptide.server.app import ServerState, create_app
from neaptide.server.batches.lines import ContextCompiler
from neaptide.server.batches.service import BatchService
from neaptide.server.batches.wiring import BatchSettings
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.routes.batches import batches_router
from neaptide.server.routes.files import files_router
from neaptide.server.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S, until_here
from tests.server.batches.fakes import ThreadChecker
from tests.server.batches.test_same_answer import RowEngine
from tests.server.conftest import MODEL_ID, USER, make_context

T = TypeVar("T")

CANARY = {"model": MODEL_ID, "messages": USER, "max_tokens": 8, "temperature": 0, "seed": 7}


class FuzzedApp:
    """The server under fuzz. ``canary`` is what a greedy request answers, always."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: FastAPI) -> None:
        self._loop = loop
        self.app = app
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        self._http = httpx2.AsyncClient(transport=transport, base_url="http://test")
        self.canary = self.greedy_text()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=PATIENCE_S)

    def request(self, method: str, path: str, **arguments: Any) -> httpx2.Response:
        return self.run(self._http.request(method, path, **arguments))

    def send(self, request: httpx2.Request) -> httpx2.Response:
        return self.run(self._http.send(request))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until_here(condition)

    def greedy_text(self) -> str:
        reply = self.request("POST", "/v1/chat/completions", json=CANARY)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def check_canary(self) -> None:
        assert self.greedy_text() == self.canary


@contextmanager
def fuzzed_app(data_dir: Path, tokenizer: Tokenizer) -> Iterator[FuzzedApp]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[FastAPI, BatchService]:
        client = EngineClient()
        context = make_context(tokenizer, client, max_model_len=64)
        compiler = ContextCompiler(context)
        service = BatchService(BatchSettings(data_dir=data_dir), client, compiler, ThreadChecker(compiler))
        app = create_app(
            ServerState(context=context, batches=service),
            extra_routers=(files_router(service), batches_router(service)),
        )
        await service.start()
        RowEngine(client).attach()
        return app, service

    try:
        app, service = asyncio.run_coroutine_threadsafe(start(), loop).result(timeout=PATIENCE_S)
        yield FuzzedApp(loop, app)
        asyncio.run_coroutine_threadsafe(service.stop(), loop).result(timeout=PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

"""The whole app: a batch line gets the answer that the same online request gets (B15)."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from neaptide.engine.messages import AddBatch, AddRequest, RequestOutput, ToEngine
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import FinishReason, Tier
from neaptide.server.app import ServerState, create_app
from neaptide.server.batches.checking.worker import WorkerChecker
from neaptide.server.batches.lines import ContextCompiler
from neaptide.server.batches.service import BatchService
from neaptide.server.batches.wiring import BatchSettings
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.routes.batches import batches_router
from neaptide.server.routes.files import files_router
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_ID, make_context
from tests.server.fake_engine import FakeEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "What is 2+2?"}]


class RowEngine(FakeEngine):
    """Runs batch rows as the requests that they are."""

    def send(self, message: ToEngine) -> None:
        if not isinstance(message, AddBatch):
            super().send(message)
            return
        self.received.append(message)
        tokens = TokenFile(message.path)
        for row, index in zip(message.rows, message.params_index, strict=True):
            name, params = f"{message.batch_id}:{row}", message.params_table[index]
            super().send(AddRequest(name, tokens.prompt(row), params, Tier.BATCH, 0.0, 0.0, 0.0, message.salt))

    def _output(self, request: AddRequest, new: list[int]) -> RequestOutput:
        self.tokens_per_output = 1
        return super()._output(request, new)


class App:
    def __init__(self, http: httpx2.AsyncClient, engine: RowEngine) -> None:
        self.http, self.engine = http, engine
        self.client = openai.AsyncOpenAI(base_url="http://t/v1", api_key="k", http_client=http, max_retries=0)

    async def run(self, endpoint: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The responses of a batch with these bodies, in order."""
        lines = [
            {"custom_id": str(i), "method": "POST", "url": endpoint, "body": {"model": MODEL_ID, **body}}
            for i, body in enumerate(bodies)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = await self.client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await self.client.batches.create(
            input_file_id=file.id,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
        )
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.01)
            batch = await self.client.batches.retrieve(batch.id)
        assert batch.status == "completed", batch
        found: dict[str, dict[str, Any]] = {}
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            text = (await self.client.files.content(file_id)).text
            found |= {entry["custom_id"]: entry["response"] for entry in map(json.loads, text.splitlines())}
        return [found[str(i)] for i in range(len(bodies))]


@asynccontextmanager
async def running(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[App]:
    client = EngineClient()
    context = make_context(tokenizer, client, max_model_len=256)
    compiler = ContextCompiler(context)
    checker = WorkerChecker(compiler.recipe())
    service = BatchService(BatchSettings(data_dir=tmp_path, tick_s=0.02), client, compiler, checker)
    routers = (files_router(service), batches_router(service))
    app = create_app(ServerState(context=context, batches=service), extra_routers=routers)
    engine = RowEngine(client)
    await service.start()
    try:
        engine.attach()
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://t") as http:
            yield App(http, engine)
    finally:
        await service.stop()


@pytest.fixture
async def app(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[App]:
    async with running(tmp_path, tokenizer) as app:
        yield app


def same_part(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created", "service_tier", "metrics")}


CHAT_BODIES: list[dict[str, Any]] = [
    {"messages": USER, "max_tokens": 5},
    {"messages": USER, "max_tokens": 4, "n": 3, "seed": 7},
    {"messages": USER, "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
    {"messages": USER, "max_tokens": 8, "stop": ["e", "a", "s"]},
    {"messages": USER, "temperature": 9},
    {"messages": [{"role": "user", "content": "word " * 3000}]},
    {"messages": [{"role": "nobody", "content": ""}]},
    {"messages": USER, "guided_json": {"not": {}}},
    {"messages": USER, "max_tokens": 3, "service_tier": "priority", "temperature": 0},
]
COMPLETION_BODIES: list[dict[str, Any]] = [
    {"prompt": "2+2=", "max_tokens": 5},
    {"prompt": ["a", "b"], "n": 2, "max_tokens": 2, "seed": 1},
    {"prompt": [10, 11, 12], "echo": True, "max_tokens": 1, "logprobs": 1},
    {"prompt": [9999], "max_tokens": 1},
    {"prompt": "x", "max_tokens": 0},
]


@pytest.mark.parametrize(("endpoint", "bodies"), [(CHAT, CHAT_BODIES), (COMPLETIONS, COMPLETION_BODIES)])
async def test_a_line_gets_the_answer_of_the_online_request(
    app: App, endpoint: str, bodies: list[dict[str, Any]]
) -> None:
    responses = await app.run(endpoint, bodies)
    for body, response in zip(bodies, responses, strict=True):
        online = await app.http.post(endpoint, json={"model": MODEL_ID, **body})
        assert (response["status_code"], same_part(response["body"])) == (
            online.status_code,
            same_part(online.json()),
        ), body
        if online.status_code == 200:
            assert response["body"]["service_tier"] == "flex"
    assert any(response["status_code"] == 200 for response in responses)
    assert any(response["status_code"] == 400 for response in responses)


async def test_stop_strings_end_the_row_in_the_engine(app: App) -> None:
    app.engine.script = [20, 21, 22, 23, 24, 25]
    (free,) = await app.run(CHAT, [{"messages": USER, "max_tokens": 6}])
    text = free["body"]["choices"][0]["message"]["content"]
    stop = text[2]
    (stopped,) = await app.run(CHAT, [{"messages": USER, "max_tokens": 6, "stop": stop}])
    assert stopped["body"]["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert stopped["body"]["choices"][0]["finish_reason"] == "stop"
    assert [reason for _, reason in app.engine.aborts] == [FinishReason.STOP]

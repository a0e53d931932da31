"""vLLM's application and engine client as the plug-in sees them, without vLLM: chats are answered by a function."""

from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from neaptide_vllm.batches.plugin import BatchesPlugin

MODEL = "tiny"
Answer = Callable[[dict[str, Any], Request], Awaitable[JSONResponse]]


def chat_reply(text: str, finish_reason: str = "stop") -> JSONResponse:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 5, "completion_tokens": len(text.split()), "total_tokens": 5 + len(text.split())}
    return JSONResponse({"object": "chat.completion", "choices": [choice], "usage": usage})


async def echo(body: dict[str, Any], request: Request) -> JSONResponse:
    """Answers with the question."""
    return chat_reply(str(body["messages"][-1]["content"]))


class FakeVllm:
    """One API process. ``asked`` has the bodies of the chats, with their priorities."""

    def __init__(self, answer: Answer = echo, *, max_num_seqs: int = 8, rank: int = 0, api_key: str | None = None):
        self.answer = answer
        self.asked: list[tuple[dict[str, Any], str | None]] = []
        self.errored = False
        self.plugin = BatchesPlugin()
        parts = {
            "parallel_config": SimpleNamespace(_api_process_rank=rank),
            "scheduler_config": SimpleNamespace(max_num_seqs=max_num_seqs),
            "cache_config": SimpleNamespace(num_gpu_blocks=1000, block_size=16),
            "device_config": SimpleNamespace(device_type="cpu"),
            "model_config": SimpleNamespace(
                model="/models/tiny", dtype="float32", max_model_len=512, get_vocab_size=lambda: 100
            ),
        }
        self.vllm_config = SimpleNamespace(**parts)
        self._args = Namespace(api_key=[api_key] if api_key else None)
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self._chat)

    def shutdown(self, timeout: float | None = None) -> None:
        """As vLLM's engine client has it."""

    async def _chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.asked.append((body, request.headers.get("x-vllm-priority")))
        return await self.answer(body, request)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[httpx.AsyncClient]:
        """Starts and stops it as vLLM does."""
        self.plugin.attach_router(self.app)
        names = SimpleNamespace(base_model_paths=[SimpleNamespace(name=MODEL)], lora_requests={"poet": None})
        self.app.state.openai_serving_models = names
        await self.plugin.init_state(self, self.app.state, self._args)
        async with self.app.router.lifespan_context(self.app):
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as http:
                yield http


async def until_gone(request: Request) -> None:
    """Waits for the client to disconnect."""
    assert (await request.receive())["type"] == "http.disconnect"

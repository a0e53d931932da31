"""Serves OpenVINO GenAI's continuous batching with the part of OpenAI's API that ``benchmarks.engine_vs_peers`` needs.

That is ``POST /v1/completions`` with token ids, greedy and without an end token, streamed or not. It runs in the
environment of ``install.sh`` and imports nothing of ours.

    python benchmarks/peers/openvino_server.py MODEL_DIR --port N [--threads N] [--dtype bf16]
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openvino
import openvino_genai
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CACHE_GB = 2
MAX_SEQS, MAX_BATCHED_TOKENS = 256, 2048


class Engine:
    """The pipeline and the thread that steps it. Tokens go to a queue per request, on the event loop."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        config = openvino_genai.SchedulerConfig()
        config.cache_size, config.enable_prefix_caching = CACHE_GB, True
        config.max_num_seqs, config.max_num_batched_tokens = MAX_SEQS, MAX_BATCHED_TOKENS
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": dtype,
            "KV_CACHE_PRECISION": dtype,  # as in ours; its default is 8 bits
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self._added: queue.Queue[tuple[list[int], int, asyncio.Queue[list[int]]]] = queue.Queue()
        self._ids = itertools.count()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, prompt: list[int], max_tokens: int) -> "asyncio.Queue[list[int]]":
        tokens: asyncio.Queue[list[int]] = asyncio.Queue()
        self._added.put((prompt, max_tokens, tokens))
        return tokens

    def _run(self) -> None:
        handles: list[tuple[Any, asyncio.Queue[list[int]]]] = []
        while True:
            while not handles or not self._added.empty():
                prompt, max_tokens, tokens = self._added.get()
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
                ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
                handles.append((self._pipeline.add_request(next(self._ids), ids, config), tokens))
            self._pipeline.step()
            for handle, tokens in handles:
                while handle.can_read():
                    for output in handle.read().values():
                        self._loop.call_soon_threadsafe(tokens.put_nowait, list(output.generated_ids))
            running = openvino_genai.GenerationStatus.RUNNING
            handles = [each for each in handles if each[0].get_status() == running]


async def stream(tokens: "asyncio.Queue[list[int]]", num_prompt: int, max_tokens: int) -> AsyncIterator[str]:
    count = 0
    while count < max_tokens:
        count += len(await tokens.get())
        finish_reason = "length" if count >= max_tokens else None
        yield event({"choices": [{"index": 0, "text": " ", "finish_reason": finish_reason}]})
    yield event({"choices": [], "usage": usage(num_prompt, count)})
    yield "data: [DONE]\n\n"


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def usage(num_prompt: int, count: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}


def app(engine: Engine) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        yield

    async def health(_: Request) -> Response:
        return Response()

    async def completions(request: Request) -> Response:
        body = await request.json()
        prompt, max_tokens = body["prompt"], body["max_tokens"]
        tokens = engine.add(prompt, max_tokens)
        if body.get("stream"):
            return StreamingResponse(stream(tokens, len(prompt), max_tokens), media_type="text/event-stream")
        token_ids: list[int] = []
        while len(token_ids) < max_tokens:
            token_ids += await tokens.get()
        choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": token_ids}
        return JSONResponse({"choices": [choice], "usage": usage(len(prompt), len(token_ids))})

    routes = [Route("/health", health), Route("/v1/completions", completions, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0, help="number of threads (0: OpenVINO's choice)")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f32"))
    args = parser.parse_args()
    engine = Engine(args.model, args.threads, args.dtype)
    uvicorn.run(app(engine), host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()

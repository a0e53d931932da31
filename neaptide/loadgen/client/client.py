"""Streaming requests against an OpenAI-compatible server, timed at the client."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from neaptide.loadgen.client.recorder import Record


@dataclass(slots=True)
class StreamClient:
    """One server, one model.

    Args:
        http: client with ``base_url`` set to the server's root.
    """

    http: httpx.AsyncClient
    model: str

    async def chat(self, messages: Sequence[dict[str, str]], max_tokens: int, **fields: Any) -> Record:
        body = {"messages": list(messages), "max_completion_tokens": max_tokens, "temperature": 0} | fields
        return await self._stream("/v1/chat/completions", body)

    async def complete(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> Record:
        return await self._stream(
            "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
        )

    async def _stream(self, path: str, body: dict[str, Any]) -> Record:
        """Every way to fail ends in ``Record.error``; only cancellation leaves early."""
        now = asyncio.get_running_loop().time
        record = Record(sent_s=now())
        body = body | {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self.http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    record.error = f"HTTP {response.status_code}: {(await response.aread()).decode()[:200]}"
                    return record
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        record.add_chunk(json.loads(line[6:]), now())
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"
        if record.error is None and record.finish_reason is None:
            record.error = "the stream ended without a finish_reason"
        record.end_s = now()
        return record


def poisson_arrivals(rate_rps: float, duration_s: float, seed: int) -> list[float]:
    """Arrival times in [0, duration_s), seconds."""
    rng = random.Random(seed)
    arrivals, t_s = [], rng.expovariate(rate_rps)
    while t_s < duration_s:
        arrivals.append(t_s)
        t_s += rng.expovariate(rate_rps)
    return arrivals


async def open_loop(
    arrivals_s: Sequence[float], send: Callable[[int], Awaitable[Record]], on_record: Callable[[int, Record], None]
) -> None:
    """Sends request i at ``arrivals_s[i]`` whatever became of the others; returns when all have ended.

    Cancelling it cancels what is in flight.
    """
    now = asyncio.get_running_loop().time
    start_s = now()

    async def one(index: int) -> None:
        await asyncio.sleep(max(0.0, start_s + arrivals_s[index] - now()))
        record = await send(index)
        record.arrival_s = arrivals_s[index]
        on_record(index, record)

    async with asyncio.TaskGroup() as group:
        for index in range(len(arrivals_s)):
            group.create_task(one(index))

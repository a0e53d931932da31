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

    async def chat(
        self, messages: Sequence[dict[str, str]], max_tokens: int, *, cancel_after_s: float | None = None, **fields: Any
    ) -> Record:
        body = {"messages": list(messages), "max_completion_tokens": max_tokens, "temperature": 0} | fields
        return await self._stream("/v1/chat/completions", body, cancel_after_s)

    async def complete(
        self, prompt: str | list[int], max_tokens: int, *, cancel_after_s: float | None = None, **fields: Any
    ) -> Record:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
        return await self._stream("/v1/completions", body, cancel_after_s)

    async def _stream(self, path: str, body: dict[str, Any], cancel_after_s: float | None) -> Record:
        """Every way to fail ends in ``Record.error``; only cancellation from outside leaves early. After
        ``cancel_after_s`` the client itself hangs up."""
        now = asyncio.get_running_loop().time
        record = Record(sent_s=now())
        body = body | {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with asyncio.timeout(cancel_after_s):
                await self._read(path, body, record)
        except TimeoutError:
            record.cancelled = True
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        if record.error is None and record.finish_reason is None and not record.cancelled:
            record.error = "the stream ended without a finish_reason"
        record.end_s = now()
        return record

    async def _read(self, path: str, body: dict[str, Any], record: Record) -> None:
        now = asyncio.get_running_loop().time
        async with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                record.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    record.add_chunk(json.loads(line[6:]), now())


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
        record.due_s = start_s + arrivals_s[index]
        on_record(index, record)

    async with asyncio.TaskGroup() as group:
        for index in range(len(arrivals_s)):
            group.create_task(one(index))


async def closed_loop(
    count: int,
    users: int,
    think_s: float,
    send: Callable[[int], Awaitable[Record]],
    on_record: Callable[[int, Record], None],
) -> None:
    """So many users, each of which sends the next of ``count`` requests ``think_s`` after the answer to the one before.

    A slow server is asked less: the times count from when a request was sent.
    """
    now = asyncio.get_running_loop().time
    start_s = now()
    indices = iter(range(count))

    async def user() -> None:
        for index in indices:
            record = await send(index)
            record.arrival_s = record.sent_s - start_s
            on_record(index, record)
            await asyncio.sleep(think_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(users, count)):
            group.create_task(user())

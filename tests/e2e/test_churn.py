"""Clients that connect and leave, thousands of times, against both processes: nothing of them stays."""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from neaptide.loadgen.client.prometheus import Samples
from neaptide.server.batches.storing.data_dir import DATABASE_NAME
from neaptide.server.why.requests import MAX_REQUESTS
from tests.e2e.server import RunningServer

SIM = {
    "NEAPTIDE_EXECUTOR": "sim",
    "NEAPTIDE_SIM_STEP_MS": "2",
    "NEAPTIDE_LOG_LEVEL": "warning",
    "NEAPTIDE_TTFT_SLO_MS": "100000",  # On a busy machine clients would be refused.
}
CHAT = "/v1/chat/completions"
CONCURRENCY = 16
MAX_GROWTH_BYTES = 5 << 20
MAX_TOKENS = 7000
"""Nobody stays until the end of so many steps, on however slow a machine."""


def request_bytes(rng: random.Random, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": f"What is {rng.randrange(1000)} + {rng.randrange(1000)}?"}]
    fields = {
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": stream,
        "n": rng.choice((1, 2)),
    }
    body = json.dumps(fields).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


async def in_the_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    request = request_bytes(rng, stream=True)
    writer.write(request[: rng.randrange(request.index(b"\r\n\r\n"))])


async def in_the_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    request = request_bytes(rng, stream=True)
    writer.write(request[: -rng.randrange(1, 40)])


async def before_the_first_token(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random
) -> None:
    writer.write(request_bytes(rng, stream=True))
    # Anywhere between the route's first line and the first token: no sign of that reaches a client.
    await asyncio.sleep(rng.uniform(0, 0.01))


async def in_the_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    writer.write(request_bytes(rng, stream=True))
    for _ in range(rng.randrange(1, 5)):
        await reader.readuntil(b"data: ")


async def without_a_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rng: random.Random) -> None:
    writer.write(request_bytes(rng, stream=False))
    await asyncio.sleep(rng.uniform(0, 0.03))


Leave = Callable[[asyncio.StreamReader, asyncio.StreamWriter, random.Random], Awaitable[None]]
KINDS: tuple[Leave, ...] = (in_the_headers, in_the_body, before_the_first_token, in_the_stream, without_a_stream)


async def churn(port: int, cycles: int, seed: int) -> None:
    """``cycles`` clients, some at once, every kind equally often; every second one resets its connection."""
    turns = iter(range(cycles))

    async def worker() -> None:
        for turn in turns:
            rng = random.Random(f"{seed} {turn}")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await KINDS[turn % len(KINDS)](reader, writer, rng)
            if turn % 2:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))


@dataclass(frozen=True)
class Footprint:
    """What a server holds while it serves one scraper. Must be the same before and after."""

    blocks_in_use: float
    blocks_not_in_use: float
    in_flight: float
    in_engine: float
    load: int
    connections: float
    tasks: float
    descriptors: tuple[int, int]

    @classmethod
    def of(cls, server: RunningServer) -> "Footprint":
        samples = Samples(server.http.get("/metrics").text)
        blocks = {
            state: samples.sum("neaptide_kv_blocks", state=state) for state in ("free", "cached", "online", "offline")
        }
        return cls(
            blocks_in_use=blocks["online"] + blocks["offline"],
            blocks_not_in_use=blocks["free"] + blocks["cached"],
            in_flight=samples.sum("neaptide_requests_in_flight"),
            in_engine=samples.sum("neaptide_requests_running") + samples.sum("neaptide_requests_waiting"),
            load=server.http.get("/load").json()["server_load"],
            connections=samples.sum("neaptide_connections"),
            tasks=samples.sum("neaptide_asyncio_tasks"),
            descriptors=(num_descriptors(server.process.pid), num_descriptors(server.engine.pid)),
        )


def num_descriptors(pid: int) -> int:
    """Those of the database are not counted: how many of its few connections are open depends on what reads at once."""
    targets: list[str] = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            targets.append(os.readlink(link))
    return sum(DATABASE_NAME not in target for target in targets)


def resident_bytes(server: RunningServer) -> list[int]:
    return [process.memory_info().rss for process in (psutil.Process(server.process.pid), server.engine)]


def left(cycles: int) -> pytest.MarkDecorator:
    return pytest.mark.acceptance("A12", "clients that connect and leave", count=cycles)


@pytest.mark.parametrize(
    "cycles",
    [
        pytest.param(800, marks=left(800)),
        pytest.param(10_000, marks=[left(10_000), pytest.mark.full]),
    ],
)
def test_clients_that_leave_leave_nothing(tmp_path: Path, cycles: int) -> None:
    # The long form begins when the server has long kept as many ended requests as it ever does.
    warm_up_cycles = 2 * MAX_REQUESTS if cycles > MAX_REQUESTS // 2 else cycles // 2
    with RunningServer(tmp_path, env=SIM) as server:
        Footprint.of(server)
        baseline = Footprint.of(server)
        assert (baseline.in_flight, baseline.in_engine, baseline.load) == (0, 0, 0)
        asyncio.run(churn(server.port, warm_up_cycles, seed=1))
        server.wait_for(lambda: Footprint.of(server) == baseline)
        before = resident_bytes(server)
        asyncio.run(churn(server.port, cycles, seed=2))
        server.wait_for(lambda: Footprint.of(server) == baseline)
        growth = [after - b for after, b in zip(resident_bytes(server), before, strict=True)]
        assert max(growth) < MAX_GROWTH_BYTES, growth
        samples = Samples(server.http.get("/metrics").text)
        assert samples.sum("neaptide_requests_total", outcome="aborted") >= (warm_up_cycles + cycles) / len(KINDS)
        assert samples.sum("neaptide_requests_total", outcome="server_error") == 0
        assert '"level": "error"' not in server.log

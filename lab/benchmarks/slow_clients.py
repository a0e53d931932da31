"""Sockets that are slow on purpose beside healthy clients, and a sudden crowd. Simulated engine, real server.

Four kinds of slow sockets: request headers that trickle, bodies that rest or trickle, sockets that say nothing,
readers that do not read their stream. ``--sockets`` of each are open at all times of an attacked phase: one that the
server closes is opened again. Healthy clients stream chats (Poisson); phases with and without the attack take turns.

Then a step of load: five times what the server's cap of requests can serve. Prints tables, then one JSON line.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient, open_loop, poisson_arrivals
from neaptide.loadgen.client.recorder import Record
from neaptide.loadgen.percentiles import percentile

CHAT = "/v1/chat/completions"
RATE_RPS = 10.0
STEP_MS = 25
RAMP_S = 30.0
SETTLE_S = 2.0
LONG_PROMPT = "\x01" * 4500
"""Every character is six bytes in a JSON event: two echoes of it do not fit into what may wait for a reader, and cost
the engine next to nothing. What is measured is slow reading, not the work of 500 streams."""
CAP_REQUESTS, STREAM_STEPS, STEP_FACTOR = 32, 100, 5


# ---- slow sockets ----------------------------------------------------------------------------------------


class Ending(NamedTuple):
    """How the server ended a slow socket."""

    kind: str
    seconds: float
    """Since it was opened; of a reader, since its reply began: a crowd of requests waits for its turn before that."""
    how: str
    """The status of a reply, or ``cut``."""


def _request(path: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % (length or len(body)) + body


async def _trickle(peer: socket.socket, begin: bytes, *, pause_s: float) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(peer, begin)
    while True:
        await asyncio.sleep(pause_s)
        await loop.sock_sendall(peer, b"x")


async def slow_header(peer: socket.socket, rng: random.Random) -> None:
    await _trickle(peer, b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: ", pause_s=rng.choice((0.5, 1.0)))


async def slow_body(peer: socket.socket, rng: random.Random) -> None:
    await _trickle(peer, _request(CHAT, b'{"messages": [', length=100_000), pause_s=rng.choice((1.0, 3600.0)))


async def silent(peer: socket.socket, rng: random.Random) -> None:
    await asyncio.sleep(3600)


async def slow_reader(peer: socket.socket, rng: random.Random) -> None:
    body = {"prompt": LONG_PROMPT, "echo": True, "n": 2, "max_tokens": 1, "stream": True}
    await asyncio.get_running_loop().sock_sendall(peer, _request("/v1/completions", json.dumps(body).encode()))
    await asyncio.sleep(3600)


KINDS: dict[str, Callable[[socket.socket, random.Random], Coroutine[Any, Any, None]]] = {
    "header": slow_header,
    "body": slow_body,
    "silent": silent,
    "reader": slow_reader,
}


async def one_slow_socket(port: int, kind: str, rng: random.Random) -> Ending:
    """Opens one and is slow until the server ends it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setblocking(False)
        start_s = loop.time()
        await loop.sock_connect(peer, ("127.0.0.1", port))
        acting = asyncio.ensure_future(KINDS[kind](peer, rng))
        try:
            if kind == "reader":
                start_s = await _until_readable(peer)
                how = await _until_cut(peer)
            else:
                how = await _until_closed(peer)
        finally:
            acting.cancel()
            await asyncio.gather(acting, return_exceptions=True)
        return Ending(kind, loop.time() - start_s, how)


async def _until_readable(peer: socket.socket) -> float:
    """The time at which something of the reply has come; takes nothing of it."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(peer, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(peer)
    return loop.time()


async def _until_closed(peer: socket.socket) -> str:
    """Reads until the end; the status of the reply, if there was one."""
    loop, reply = asyncio.get_running_loop(), b""
    with suppress(ConnectionError):
        while data := await loop.sock_recv(peer, 4096):
            reply += data
    return reply[9:12].decode() if reply.startswith(b"HTTP/1.1 ") else "cut"


async def _until_cut(peer: socket.socket) -> str:
    """Without reading: a connection that is gone has no peer any more."""
    while True:
        await asyncio.sleep(0.25)
        info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        if info[0] != 1:  # no longer established
            return "cut"


async def attack(port: int, sockets: int, kinds: Sequence[str], endings: list[Ending]) -> None:
    """Keeps ``sockets`` of each kind open until cancelled; what the server ends is noted, and opened again."""

    async def keep(kind: str, number: int) -> None:
        rng = random.Random(f"{kind} {number}")
        await asyncio.sleep(rng.uniform(0, RAMP_S))
        while True:
            endings.append(await one_slow_socket(port, kind, rng))

    async with asyncio.TaskGroup() as group:
        for kind in kinds:
            for number in range(sockets):
                group.create_task(keep(kind, number))


async def attack_main(port: int, sockets: int, kinds: Sequence[str]) -> None:
    """A process of its own, so that the healthy client's clock is not disturbed. Ends when its stdin closes."""
    endings: list[Ending] = []
    attacking = asyncio.ensure_future(attack(port, sockets, kinds, endings))
    await asyncio.to_thread(sys.stdin.read)
    attacking.cancel()
    await asyncio.gather(attacking, return_exceptions=True)
    print(json.dumps(endings))


# ---- healthy clients -------------------------------------------------------------------------------------


async def healthy(base_url: str, duration_s: float, seed: int) -> list[Record]:
    records: list[Record] = []
    async with StreamClient(base_url, "neaptide-tiny", timeout_s=60.0) as client:
        arrivals = poisson_arrivals(RATE_RPS, duration_s, seed)

        def send(index: int) -> Coroutine[Any, Any, Record]:
            return client.chat([{"role": "user", "content": f"What is {index} + {seed}?"}], 16, ignore_eos=True)

        await open_loop(arrivals, send, lambda index, record: records.append(record))
    return records


@dataclass(slots=True)
class Attacked:
    records: list[Record]
    endings: list[Ending]


async def attacked(
    base_url: str, port: int, sockets: int, kinds: Sequence[str], duration_s: float, seed: int
) -> Attacked:
    command = [sys.executable, "-m", "lab.benchmarks.slow_clients", "--attack", str(port), "--sockets", str(sockets)]
    command += ["--kinds", *kinds]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24)
    await asyncio.sleep(RAMP_S + SETTLE_S)
    records = await healthy(base_url, duration_s, seed)
    out, _ = await process.communicate(b"")
    await asyncio.sleep(SETTLE_S)
    return Attacked(records, [Ending(*entry) for entry in json.loads(out)])


# ---- a crowd ---------------------------------------------------------------------------------------------


async def load_step(directory: Path, duration_s: float) -> dict[str, float]:
    """One time, then five times what the cap of requests can serve."""
    os.environ["NEAPTIDE_MAX_ONLINE_REQUESTS"] = str(CAP_REQUESTS)
    capacity_rps = CAP_REQUESTS / (STREAM_STEPS * STEP_MS / 1e3)
    results: list[tuple[int, float]] = []
    async with ServerProcess([], directory) as server:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60.0, limits=httpx.Limits()) as http:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": STREAM_STEPS, "ignore_eos": True}

            async def one(at_s: float) -> None:
                await asyncio.sleep(at_s)
                start_s = asyncio.get_running_loop().time()
                reply = await http.post(CHAT, json=body)
                results.append((reply.status_code, asyncio.get_running_loop().time() - start_s))

            for factor in (1, STEP_FACTOR):
                results.clear()
                arrivals = poisson_arrivals(factor * capacity_rps, duration_s, seed=factor)
                await asyncio.gather(*map(one, arrivals))
    refused_s = [seconds for status, seconds in results if status == 503]
    return {
        "offered": len(results),
        "served": sum(status == 200 for status, _ in results),
        "refused": len(refused_s),
        "other": sum(status not in (200, 503) for status, _ in results),
        "refused_p50_ms": 1e3 * percentile(refused_s, 0.5),
        "refused_p99_ms": 1e3 * percentile(refused_s, 0.99),
    }


# ---- the whole -------------------------------------------------------------------------------------------


def ttfts_ms(records: Sequence[Record]) -> list[float]:
    return [1e3 * r.ttft_s for r in records if r.ttft_s is not None]


def endings_by_kind(endings: Sequence[Ending]) -> dict[str, dict[str, Any]]:
    found = {}
    for kind in sorted({ending.kind for ending in endings}):
        mine = [ending for ending in endings if ending.kind == kind]
        seconds = [ending.seconds for ending in mine]
        found[kind] = {
            "ended": len(mine),
            "how": dict(Counter(ending.how for ending in mine)),
            "first_s": min(seconds, default=None),
            "p50_s": percentile(seconds, 0.5),
            "last_s": max(seconds, default=None),
        }
    return found


async def run(sockets: int, kinds: Sequence[str], phase_s: float, repeats: int) -> dict[str, Any]:
    from benchmarks.common import print_table

    os.environ |= {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": str(STEP_MS), "NEAPTIDE_LOG_LEVEL": "warning"}
    alone: list[Record] = []
    beside: list[Record] = []
    endings: list[Ending] = []
    with tempfile.TemporaryDirectory() as directory:
        async with ServerProcess([], Path(directory) / "slow") as server:
            port = int(server.base_url.rpartition(":")[2])
            await healthy(server.base_url, 3.0, seed=0)
            for repeat in range(repeats):
                alone += await healthy(server.base_url, phase_s, seed=repeat)
                phase = await attacked(server.base_url, port, sockets, kinds, phase_s, seed=100 + repeat)
                beside += phase.records
                endings += phase.endings
        crowd = await load_step(Path(directory) / "crowd", duration_s=10.0)
    ended = endings_by_kind(endings)
    p50 = [percentile(ttfts_ms(records), 0.5) for records in (alone, beside)]
    p99 = [percentile(ttfts_ms(records), 0.99) for records in (alone, beside)]
    failed = sum(record.error is not None for record in (*alone, *beside))
    print_table(
        f"Healthy clients, {RATE_RPS:.0f} requests/s",
        ("", "requests", "TTFT p50 ms", "TTFT p99 ms"),
        [
            ("alone", len(alone), p50[0], p99[0]),
            (f"beside {len(kinds)} x {sockets} slow sockets", len(beside), p50[1], p99[1]),
        ],
    )
    print_table(
        "Slow sockets",
        ("kind", "ended", "how", "first s", "p50 s", "last s"),
        [(kind, row["ended"], row["how"], row["first_s"], row["p50_s"], row["last_s"]) for kind, row in ended.items()],
    )
    print_table(f"Load step to {STEP_FACTOR} times capacity", tuple(crowd), [tuple(crowd.values())])
    return {
        "ratios": {"ttft_p99_vs_alone": p99[1] / p99[0], "ttft_p50_vs_alone": p50[1] / p50[0]},
        "ttft_p99_ms": {"alone": p99[0], "beside": p99[1]},
        "failed": failed,
        "machine_load": os.getloadavg()[1],
        "sockets_per_kind": sockets,
        "slow": ended,
        "load_step": crowd,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sockets", type=int, default=500, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--phase-s", type=float, default=40.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack is not None:
        asyncio.run(attack_main(args.attack, args.sockets, args.kinds))
    else:
        print(json.dumps(asyncio.run(run(args.sockets, args.kinds, args.phase_s, args.repeats))))


if __name__ == "__main__":
    main()

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
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import poisson_arrivals
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.percentiles import percentile
from tests.e2e.slow_sockets import CHAT, KINDS, RATE_RPS, Ending, healthy, one_slow_socket

STEP_MS = 25
RAMP_S = 30.0
SETTLE_S = 2.0
CAP_REQUESTS, STREAM_STEPS, STEP_FACTOR = 32, 100, 5


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


@dataclass(slots=True)
class Attacked:
    records: list[ChatRecord]
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


def ttfts_ms(records: Sequence[ChatRecord]) -> list[float]:
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
    alone: list[ChatRecord] = []
    beside: list[ChatRecord] = []
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

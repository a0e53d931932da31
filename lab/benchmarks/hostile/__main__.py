"""Chats beside hostile requests: ``python -m lab.benchmarks.hostile [NAME ...]``, all of ``ATTACKS`` without a name.

The embedded model behind the real server, on the CPU. For each attack the same chats are streamed alone and beside it,
by turns, on a server of its own; every second pair of turns goes the other way round. What is measured: time to the
first token, the share of chats that met the server's own targets, and how much larger the engine is when the attack is
over than before it. An attack holds if attainment falls by at most a point, the 99th percentile of the time to the
first token is at most 1.5 times what it is alone, or beside the same load without what is hostile in it where the
attack names one, and the engine's memory is back to within 5%.

Prints a table, then one JSON line. Exit status 1 unless all attacks hold.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import REPOSITORY, print_table
from lab.benchmarks.hostile.attacks import ATTACKS, FLAGS, USER
from lab.benchmarks.structured.neighbours import RATE_RPS, chats
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient
from neaptide.loadgen.client.recorder import ChatRecord, attainment
from neaptide.loadgen.percentiles import percentile

MODEL, KEY = "neaptide-tiny", "good"
CHAT_TOKENS = 4
HELD = {"choice": ["left", "right"]}
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.1
"""The server's own, on a CPU."""
TTFT_BAR, LOST_BAR, MEMORY_BAR = 1.5, 0.01, 1.05
RAMP_S, SETTLE_S = 2.0, 5.0
"""Pauses: from an attack's first request to the first chat, and from its end to the reading of the memory."""


async def chats_beside(
    client: StreamClient, url: str, name: str, duration_s: float, seed: int
) -> tuple[list[ChatRecord], dict[str, int]]:
    """The chats, and what the attack was answered."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "lab.benchmarks.hostile.attacks", url, name]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=REPOSITORY)
    await asyncio.sleep(RAMP_S)
    records = await chats(client, duration_s, seed, CHAT_TOKENS)
    out, _ = await process.communicate(b"")
    return records, json.loads(out)


def engine_of(server_pid: int) -> psutil.Process:
    """The engine's process, the largest child of the API process."""
    family = psutil.Process(server_pid).children(recursive=True)
    return max(family, key=lambda process: process.memory_info().rss)


async def measure(name: str, turn_s: float, pairs: int) -> dict[str, Any]:
    alone: list[ChatRecord] = []
    beside: list[ChatRecord] = []
    like: list[ChatRecord] = []
    statuses: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        flags = [*FLAGS, "--api-key", KEY, "--shadow", "off", *ATTACKS[name].flags]
        async with ServerProcess(flags, Path(directory)) as server:
            headers = {"authorization": f"Bearer {KEY}"}
            async with StreamClient(server.base_url, MODEL, headers=headers, timeout_s=120.0) as client:
                await chats(client, 3.0, 0, CHAT_TOKENS)
                await client.chat(USER, 16, structured_outputs=HELD)  # what is loaded once
                engine = engine_of(server.pid)
                before = engine.memory_info().rss
                for index in range(1, pairs + 1):
                    if index % 2:
                        alone += await chats(client, turn_s, index, CHAT_TOKENS)
                    found, answered = await chats_beside(client, server.base_url, name, turn_s, index)
                    beside += found
                    statuses.append(answered)
                    await asyncio.sleep(SETTLE_S)
                    if (plain := ATTACKS[name].like) != "":
                        like += (await chats_beside(client, server.base_url, plain, turn_s, index))[0]
                        await asyncio.sleep(SETTLE_S)
                    if not index % 2:
                        alone += await chats(client, turn_s, index, CHAT_TOKENS)
                await chats(client, SETTLE_S, 0, CHAT_TOKENS)
                after = engine.memory_info().rss
    return summary(alone, beside, like, before, after) | {"statuses": statuses}


def summary(
    alone: Sequence[ChatRecord], beside: Sequence[ChatRecord], like: Sequence[ChatRecord], before: int, after: int
) -> dict[str, Any]:
    """The figures of one attack, and whether it holds: a load that is large without being hostile may take its time."""
    p50 = [percentile(_ttfts_ms(records), 0.5) for records in (alone, beside)]
    p99 = [percentile(_ttfts_ms(records), 0.99) for records in (alone, beside)]
    met = [attainment(records, TTFT_SLO_S, TPOT_SLO_S) for records in (alone, beside)]
    like_p99 = percentile(_ttfts_ms(like), 0.99) if like else None
    within = p99[1] <= TTFT_BAR * max(p99[0], like_p99 or 0.0)
    holds = met[1] >= met[0] - LOST_BAR and within and after <= MEMORY_BAR * before
    return {
        "chats": [len(alone), len(beside)],
        "ttft_p50_ms": p50,
        "ttft_p99_ms": p99,
        "ttft_p99_vs_alone": p99[1] / p99[0],
        "ttft_p99_ms_of_the_load_alone": like_p99,
        "attainment": met,
        "engine_mb": [before / 1e6, after / 1e6],
        "holds": holds,
    }


def _ttfts_ms(records: Sequence[ChatRecord]) -> list[float]:
    """One that failed counts as one that never came."""
    return [1e3 * (record.ttft_s if record.ttft_s is not None else 120.0) for record in records]


def report(found: dict[str, dict[str, Any]]) -> None:
    columns = ("attack", "p50 ms", "beside", "p99 ms", "beside", "met", "beside", "engine MB", "after", "holds")
    rows = [
        (
            name,
            *(f"{value:.0f}" for pair in (one["ttft_p50_ms"], one["ttft_p99_ms"]) for value in pair),
            *(f"{value:.3f}" for value in one["attainment"]),
            *(f"{value:.0f}" for value in one["engine_mb"]),
            "yes" if one["holds"] else "NO",
        )
        for name, one in found.items()
    ]
    print_table(f"Chats alone and beside hostile requests, {RATE_RPS:.0f} a second", columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(ATTACKS))
    parser.add_argument("--turn-s", type=float, default=20.0)
    parser.add_argument("--pairs", type=int, default=2)
    args = parser.parse_args()
    if unknown := set(args.names) - ATTACKS.keys():
        parser.error(f"there is no attack {unknown.pop()!r}; there are: {'; '.join(ATTACKS)}")
    os.environ["NEAPTIDE_LOG_LEVEL"] = "warning"
    found: dict[str, dict[str, Any]] = {}
    for name in args.names or ATTACKS:
        found[name] = asyncio.run(measure(name, args.turn_s, args.pairs))
        print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)  # lest an hour be lost
    report(found)
    print(json.dumps(found | {"machine_load": os.getloadavg()[1]}))
    return 0 if all(one["holds"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

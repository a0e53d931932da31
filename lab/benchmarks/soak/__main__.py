"""A soak: minutes of mixed load over HTTP on a real server, and whether it forgets, leaks or breaks anything.

The embedded model, both processes. Chats streamed and not, several answers at once, clients that leave, malformed
requests, scrapes, and batches that are worked off, cancelled or refused. The warm-up begins with all that is malformed,
from several clients at once: to tokenize 80 kB takes 30 MB in every thread, once. After the warm-up the resident memory
of the API process and of the engine must not grow by more than 1 MB in 10 minutes (the median of the slopes between all
pairs of half minutes, so that one spike decides nothing); everything that was accepted got an answer; every batch line
is in a file exactly once; every malformed request got a 4xx in OpenAI's shape; every 5xx says why and when to come
again; and nothing is left in the engine at the end.

    python -m lab.benchmarks.soak                 # 20 minutes
    python -m lab.benchmarks.soak --minutes 2 --warm-up-minutes 1

Prints a table, then one JSON line; the exit status is 1 if a bar fails. Time in which this process was stopped is not
counted.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import print_table
from lab.benchmarks.soak.load import MODEL, RATES_RPS, Clients, Ledger, Visit, visit
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient, poisson_arrivals
from neaptide.loadgen.client.prometheus import Samples

START_TIMEOUT_S = 1800.0
"""It takes seconds, but this process and the server may be stopped."""
SAMPLE_S = 2.0
LONGEST_GAP_S = 3 * SAMPLE_S
"""Between samples; a longer one means that this process was stopped."""
BIN_S = 30.0
MOST_SLOPE_MB = 1.0
"""In ten minutes."""
DRAIN_S = 120.0
"""For what is in flight at the end."""
PROCESSES = ("API", "engine")
LEFT_BEHIND = ("neaptide_requests_running", "neaptide_requests_waiting")


@dataclass(slots=True)
class Memory:
    """Resident bytes of the server's processes over the time that this process ran."""

    samples: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {name: [] for name in PROCESSES})
    active_s: float = 0.0
    stopped_s: float = 0.0
    engines: set[int] = field(default_factory=set)
    """Process ids: more than one means that an engine was replaced."""

    def pass_time(self, seconds: float) -> None:
        counted_s = seconds if seconds <= LONGEST_GAP_S else SAMPLE_S
        self.active_s += counted_s
        self.stopped_s += seconds - counted_s

    def sample(self, server: psutil.Process) -> None:
        for process in (server, *server.children()):
            try:
                name = process_name(process.cmdline(), is_server=process is server)
                if name is not None:
                    self.samples[name].append((self.active_s, process.memory_info().rss))
                if name == "engine":
                    self.engines.add(process.pid)
            except psutil.Error:
                continue  # it ended between two looks

    async def watch(self, server: psutil.Process) -> None:
        now = asyncio.get_running_loop().time
        last_s = now()
        while True:
            self.sample(server)
            await asyncio.sleep(SAMPLE_S)
            self.pass_time(now() - last_s)
            last_s = now()


def process_name(command: Sequence[str], *, is_server: bool) -> str | None:
    """None for processes that come and go: that check files, plan, or simulate for the shadow gauge."""
    if is_server:
        return "API"
    return "engine" if "neaptide.launch.serve" in command else None


def bins(samples: Sequence[tuple[float, float]], from_s: float) -> list[tuple[float, float]]:
    """The median of every whole half minute after ``from_s``."""
    found: dict[int, list[float]] = {}
    for at_s, value in samples:
        if at_s >= from_s:
            found.setdefault(int((at_s - from_s) / BIN_S), []).append(value)
    last = max(found, default=0)
    return [((i + 0.5) * BIN_S, statistics.median(found[i])) for i in sorted(found) if i < last or last == 0]


def slope_mb_per_10_min(points: Sequence[tuple[float, float]]) -> float:
    """Theil and Sen's estimate; 0 of fewer than two points."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2)]
    return 600.0 * statistics.median(slopes) / 1e6 if slopes else 0.0


async def load(clients: Clients, duration_s: float, seed: int) -> None:
    """Every kind of client at its own rate; returns when all have been answered or have left."""
    tasks: set[asyncio.Task[None]] = set()

    async def stream_of(kind: Visit, rate_rps: float, number: int) -> None:
        last_s = 0.0
        for at_s in poisson_arrivals(rate_rps, duration_s, 100 * seed + number):
            # By gaps and not by the clock: a client that was stopped must not come back as a crowd.
            await asyncio.sleep(at_s - last_s)
            last_s = at_s
            task = asyncio.create_task(visit(clients, kind, getattr(kind, "__name__", "visit")))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    await asyncio.gather(*(stream_of(kind, rate, i) for i, (kind, rate) in enumerate(RATES_RPS.items())))
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=DRAIN_S)
        for task in pending:
            task.cancel()


async def left_behind(http: httpx.AsyncClient) -> dict[str, float]:
    """What the engine still holds when there is nothing to do."""
    for _ in range(20):
        samples = Samples((await http.get("/metrics")).text)
        found = {name: samples.sum(name) for name in LEFT_BEHIND}
        found["KV blocks held"] = sum(samples.sum("neaptide_kv_blocks", state=s) for s in ("online", "offline"))
        if not any(found.values()):
            break
        await asyncio.sleep(0.5)
    return found


def bars(memory: Memory, ledger: Ledger, left: dict[str, float], warm_up_s: float) -> dict[str, tuple[Any, bool]]:
    """What must be true: its figure, and whether it holds."""
    found: dict[str, tuple[Any, bool]] = {}
    for name in PROCESSES:
        slope = slope_mb_per_10_min(bins(memory.samples[name], warm_up_s))
        found[f"{name}: MB more in 10 minutes"] = (round(slope, 2), slope < MOST_SLOPE_MB)
    found["accepted without an answer"] = (ledger.lost, ledger.lost == 0)
    found["5xx unexplained"] = (ledger.unexplained.total(), not ledger.unexplained)
    found["malformed and not refused"] = (ledger.not_refused, ledger.not_refused == 0)
    found["left in the engine"] = (sum(left.values()), not any(left.values()))
    found["engines"] = (len(memory.engines), len(memory.engines) == 1)
    return found


async def soak(minutes: float, warm_up_minutes: float, seed: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    memory, ledger = Memory(), Ledger()
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(["--log-level", "warning", *flags], Path(directory), START_TIMEOUT_S)
        # No limit to waiting: this process may be stopped for longer than any that would make sense.
        async with (
            server,
            httpx.AsyncClient(base_url=server.base_url, timeout=None) as http,
            StreamClient.beside(http, MODEL) as streams,
        ):
            (process,) = (p for p in psutil.Process().children() if "serve" in p.cmdline())
            watching = asyncio.create_task(memory.watch(process))
            clients = Clients(http, streams, ledger, random.Random(seed))
            for _ in range(2):
                await clients.every_nonsense()
            await load(clients, 60.0 * minutes, seed)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            left = await left_behind(http)
            times = [one.cpu_times() for one in (process, *process.children())]
            cpu_s = sum(t.user + t.system for t in times)
        log = (Path(directory) / "server.log").read_text(errors="replace")
    verdicts = bars(memory, ledger, left, 60.0 * warm_up_minutes)
    return {
        "holds": all(holds for _, holds in verdicts.values()),
        "bars": {name: {"is": value, "holds": holds} for name, (value, holds) in verdicts.items()},
        "minutes": round(memory.active_s / 60, 1),
        "stopped_s": round(memory.stopped_s, 1),
        "asked": dict(ledger.asked),
        "left_by_clients": dict(ledger.left),
        "wrong_answers": dict(+ledger.wrong),
        "explained": dict(ledger.explained),
        "rss_mb": {name: rss_mb(memory.samples[name]) for name in PROCESSES},
        "cpu_s": round(cpu_s, 1),
        "notes": ledger.notes,
        "log_tail": log[-2000:],
    }


def rss_mb(samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    values = [value / 1e6 for _, value in samples]
    return {"first": round(values[0], 1), "most": round(max(values), 1), "last": round(values[-1], 1)}


def print_result(result: dict[str, Any]) -> None:
    rows = [[name, bar["is"], "holds" if bar["holds"] else "FAILS"] for name, bar in result["bars"].items()]
    print_table(f"soak, {result['minutes']} minutes, {sum(result['asked'].values())} visits", ["bar", "is", ""], rows)
    memory = [[name, *(f"{value:.1f}" for value in mb.values())] for name, mb in result["rss_mb"].items()]
    print_table("resident memory, MB", ["process", "first", "most", "last"], memory)
    left, wrong = result["left_by_clients"], result["wrong_answers"]
    visits = [[name, count, left.get(name, 0), wrong.get(name, 0)] for name, count in result["asked"].items()]
    print_table("visits", ["kind", "asked", "left on purpose", "not the trained answer"], visits)
    print(json.dumps(result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--warm-up-minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kv-cache-gib",
        help="of the server (its default, 1: 32,768 blocks, and 400 bytes more in the engine for each that comes to be "
        "cached; 0.03125 is 1,024, which the warm-up fills)",
    )
    args = parser.parse_args()
    if args.warm_up_minutes >= args.minutes:
        parser.error("the warm-up takes all of the time")
    flags = () if args.kv_cache_gib is None else ("--kv-cache-gib", args.kv_cache_gib)
    result = asyncio.run(soak(args.minutes, args.warm_up_minutes, args.seed, flags))
    print_result(result)
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())

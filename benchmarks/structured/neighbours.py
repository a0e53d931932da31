"""Chats beside schemas and grammars that are made to be too much: the embedded model behind the real server.

Turns of the same chats follow each other: alone, beside what has to be refused, beside what is held at a price. What
each kind got and how long the longest took, what the chats felt of it, and what is left of it in processes,
descriptors, files and memory.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import REPOSITORY, print_table
from benchmarks.structured.attack import CHAT, KINDS, USER
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient, open_loop, poisson_arrivals
from neaptide.loadgen.client.recorder import Record
from neaptide.loadgen.percentiles import percentile

MODEL = "neaptide-tiny"
RATE_RPS = 4.0
CHAT_TOKENS = 48
GOOD = {"messages": USER, "guided_choice": ["left", "right"], "max_tokens": 16}
LIMIT_S = 2.0
"""For a refusal."""
NEIGHBOURS_BAR = 1.1
"""Of a chat's time per token, beside the attack and alone."""


class Attacks:
    """What became of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._started = 0
        self.statuses: dict[str, Counter[str]] = {}
        self.longest_s: dict[str, float] = {}

    async def run(self, kind: str, duration_s: float) -> None:
        self._started += 1
        arguments = [self._url, kind, str(duration_s), str(100_000 * self._started)]
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "benchmarks.structured.attack", *arguments],
            stdout=asyncio.subprocess.PIPE,
            cwd=REPOSITORY,
        )
        out, _ = await process.communicate()
        for name, found in json.loads(out).items():
            self.statuses.setdefault(name, Counter()).update(found["statuses"])
            self.longest_s[name] = max(self.longest_s.get(name, 0.0), found["longest_s"])

    def summary(self) -> dict[str, float]:
        rows = [
            [name, " ".join(f"{status}: {n}" for status, n in sorted(found.items())), f"{self.longest_s[name]:.2f}"]
            for name, found in self.statuses.items()
        ]
        print_table("what was asked", ["kind", "statuses", "longest, s"], rows)
        hostile = [self.statuses[name] for name in KINDS["hostile"]]
        return {
            "hostile": sum(found.total() for found in hostile),
            "hostile_not_refused": sum(found.total() - found["400"] for found in hostile),
            "longest_refusal_s": max(self.longest_s[name] for name in KINDS["hostile"]),
            "held": sum(self.statuses[name].total() for name in KINDS["held"]),
        }


async def _chats(http: httpx.AsyncClient, duration_s: float, seed: int) -> list[Record]:
    records: list[Record] = []
    client = StreamClient(http, MODEL)

    def send(index: int) -> Coroutine[Any, Any, Record]:
        question = [{"role": "user", "content": f"What is {index} + {seed}?"}]
        return client.chat(question, CHAT_TOKENS, ignore_eos=True)

    await open_loop(poisson_arrivals(RATE_RPS, duration_s, seed), send, lambda index, record: records.append(record))
    return records


def _footprint(server: psutil.Process, temporary: Path) -> dict[str, float]:
    family = [server, *server.children(recursive=True)]
    return {
        "processes": len(family),
        "descriptors": sum(process.num_fds() for process in family),
        "files": sum(1 for _ in temporary.rglob("*")),
        "memory_mib": sum(process.memory_info().rss for process in family) / 2**20,
    }


def _felt(records: dict[str, list[Record]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for q, share in (("p50", 0.5), ("p99", 0.99)):
        tpot_ms = {
            name: 1e3 * percentile([record.tpot_s for record in mine if record.tpot_s is not None], share)
            for name, mine in records.items()
        }
        found |= {f"tpot_{q}_ms_{name}": value for name, value in tpot_ms.items()}
        found |= {f"tpot_{q}_ratio_{kind}": tpot_ms[kind] / tpot_ms["alone"] for kind in KINDS}
    return found | {"chats_failed": sum(record.error is not None for mine in records.values() for record in mine)}


async def measure_neighbours(turn_s: float, turns: int) -> dict[str, float]:
    records: dict[str, list[Record]] = {"alone": [], **{kind: [] for kind in KINDS}}
    with tempfile.TemporaryDirectory() as path, tempfile.TemporaryDirectory() as inner:
        temporary = Path(inner)
        os.environ |= {"NEAPTIDE_LOG_LEVEL": "warning", "TMPDIR": inner}
        one_request_each = httpx.Limits(max_keepalive_connections=0)
        async with (
            ServerProcess(["--max-model-len", "2048", "--shadow", "off"], Path(path)) as server,
            httpx.AsyncClient(base_url=server.base_url, timeout=60.0, limits=one_request_each) as http,
        ):
            (process,) = (p for p in psutil.Process().children() if "serve" in p.cmdline())
            attacks = Attacks(server.base_url)
            await _chats(http, 3.0, seed=0)
            for kind in KINDS:
                await attacks.run(kind, turn_s)  # what is only once, such as memory that a process keeps
            (await http.post(CHAT, json=GOOD)).raise_for_status()
            before = _footprint(process, temporary)
            for turn in range(turns):
                records["alone"] += await _chats(http, turn_s, seed=turn)
                for kind in KINDS:
                    _, beside = await asyncio.gather(attacks.run(kind, turn_s), _chats(http, turn_s, seed=turn))
                    records[kind] += beside
            (await http.post(CHAT, json=GOOD | {"guided_choice": ["up", "down"]})).raise_for_status()
            after = _footprint(process, temporary)
    more = {f"more_{name}": after[name] - before[name] for name in before}
    found = attacks.summary() | _felt(records) | more
    found["holds"] = (
        found["hostile_not_refused"] == 0
        and found["longest_refusal_s"] <= LIMIT_S
        and found["tpot_p99_ratio_hostile"] <= NEIGHBOURS_BAR
        and not any(found[f"more_{name}"] > 0 for name in ("processes", "descriptors", "files"))
    )
    return found

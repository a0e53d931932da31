"""Chats beside schemas and grammars that are made to be too much: the embedded model behind the real server.

Turns go by pairs, the same chats alone and beside the attack, and every second pair the other way round, so that a
machine that becomes faster or slower does so for both. What each kind got and how long the longest took, what the chats
felt of it, and what is left of it in processes, descriptors, files and memory. How far the halves of the chats alone
are apart says what such a ratio is worth.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.common import REPOSITORY, print_table
from lab.benchmarks.pairs import ratios
from lab.benchmarks.structured.attack import CHAT, KINDS, USER
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient, open_loop, poisson_arrivals
from neaptide.loadgen.client.recorder import ChatRecord

MODEL = "neaptide-tiny"
RATE_RPS = 8.0
CHAT_TOKENS = 48
GOOD = {"messages": USER, "guided_choice": ["left", "right"], "max_tokens": 16}
LIMIT_S = 2.0
"""For a refusal."""
NEIGHBOURS_BAR = 1.1
"""Largest ratio of a chat's time per token, with the attack over alone."""


class Pair(NamedTuple):
    """The same chats, twice."""

    alone: list[ChatRecord]
    beside: list[ChatRecord]


class Attacks:
    """A process that attacks on request, and the results of its requests."""

    def __init__(self, process: asyncio.subprocess.Process, kind: str) -> None:
        self._process = process
        self._kind = kind
        self.statuses: dict[str, Counter[str]] = {}
        self.longest_s: dict[str, float] = {}

    @classmethod
    @asynccontextmanager
    async def on(cls, url: str, kind: str) -> AsyncIterator["Attacks"]:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "lab.benchmarks.structured.attack", url, kind],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=REPOSITORY,
        )
        assert process.stdin is not None
        yield cls(process, kind)
        process.stdin.close()
        await process.wait()

    async def run(self, duration_s: float) -> None:
        """Returns when the last request has been answered."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{duration_s}\n".encode())
        for name, found in json.loads(await self._process.stdout.readline()).items():
            self.statuses.setdefault(name, Counter()).update(found["statuses"])
            self.longest_s[name] = max(self.longest_s.get(name, 0.0), found["longest_s"])

    def summary(self) -> dict[str, float]:
        rows = [
            [name, " ".join(f"{status}: {n}" for status, n in sorted(found.items())), f"{self.longest_s[name]:.2f}"]
            for name, found in self.statuses.items()
        ]
        print_table("what was asked", ["kind", "statuses", "longest, s"], rows)
        wanted = "200" if self._kind == "held" else "400"
        return {
            "asked": sum(found.total() for found in self.statuses.values()),
            "kinds_not_asked": len(KINDS[self._kind].keys() - self.statuses.keys()),
            f"not_{wanted}": sum(found.total() - found[wanted] for found in self.statuses.values()),
            "longest_answer_s": max(self.longest_s.values()),
        }


async def chats(client: StreamClient, duration_s: float, seed: int, max_tokens: int = CHAT_TOKENS) -> list[ChatRecord]:
    """Streamed sums that arrive at random, ``RATE_RPS`` a second; returns when the last one has ended."""
    records: list[ChatRecord] = []

    def send(index: int) -> Coroutine[Any, Any, ChatRecord]:
        question = [{"role": "user", "content": f"What is {index} + {seed}?"}]
        return client.chat(question, max_tokens, ignore_eos=True)

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


def felt(pairs: Sequence[Pair], seed: int = 0) -> dict[str, float]:
    """Times per token, alone and with the attack, and their ratios (``lab.benchmarks.pairs``)."""
    alone_ms = [_tpots_ms(pair.alone) for pair in pairs]
    beside_ms = [_tpots_ms(pair.beside) for pair in pairs]
    found: dict[str, float] = {"chats": sum(map(len, [*alone_ms, *beside_ms]))}
    found |= ratios("tpot_ms", alone_ms, beside_ms, random.Random(seed))
    failed = [record.error for pair in pairs for turn in pair for record in turn if record.error is not None]
    return found | {"chats_failed": len(failed)}


def _tpots_ms(turn: Sequence[ChatRecord]) -> list[float]:
    return [1e3 * record.tpot_s for record in turn if record.tpot_s is not None]


async def measure_neighbours(kind: str, turn_s: float, num_pairs: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as path, tempfile.TemporaryDirectory() as inner:
        temporary = Path(inner)
        os.environ |= {"NEAPTIDE_LOG_LEVEL": "warning", "TMPDIR": inner}
        one_request_each = httpx.Limits(max_keepalive_connections=0)
        async with (
            ServerProcess(["--max-model-len", "2048", "--shadow", "off"], Path(path)) as server,
            httpx.AsyncClient(base_url=server.base_url, timeout=60.0, limits=one_request_each) as http,
            StreamClient(server.base_url, MODEL, timeout_s=60.0, keep_alive_s=0.0) as client,
            Attacks.on(server.base_url, kind) as attacks,
        ):
            (process,) = (p for p in psutil.Process().children() if "serve" in p.cmdline())
            await chats(client, turn_s, seed=0)
            await attacks.run(2 * turn_s)  # what is only once, such as memory that a process keeps
            (await http.post(CHAT, json=GOOD)).raise_for_status()
            before = _footprint(process, temporary)
            pairs = [await _pair(client, attacks, turn_s, index) for index in range(num_pairs)]
            (await http.post(CHAT, json=GOOD | {"guided_choice": ["up", "down"]})).raise_for_status()
            after = _footprint(process, temporary)
    more = {f"more_{name}": after[name] - before[name] for name in before}
    found = attacks.summary() | felt(pairs) | more
    # Where the chats alone differ by more than the bar, a ratio within it says nothing.
    found["is_still"] = abs(found["tpot_p99_ratio_of_halves_alone"] - 1.0) <= NEIGHBOURS_BAR - 1.0
    if kind == "hostile":
        found["holds"] = found["is_still"] and (
            found["kinds_not_asked"] == found["not_400"] == found["chats_failed"] == 0
            and found["longest_answer_s"] <= LIMIT_S
            and found["tpot_p99_ratio"] <= NEIGHBOURS_BAR
            and not any(found[f"more_{name}"] > 0 for name in ("processes", "descriptors", "files"))
        )
    return found


async def _pair(client: StreamClient, attacks: Attacks, turn_s: float, index: int) -> Pair:
    """Runs one turn alone and one with the attack, in alternating order."""
    if index % 2:
        _, beside = await asyncio.gather(attacks.run(turn_s), chats(client, turn_s, index))
        return Pair(await chats(client, turn_s, index), beside)
    alone = await chats(client, turn_s, index)
    _, beside = await asyncio.gather(attacks.run(turn_s), chats(client, turn_s, index))
    return Pair(alone, beside)

"""What one key waits for while another's work is queued: ``python -m lab.benchmarks.hostile.turns [files] [grammars]``.

    files      a batch file of 200 lines until it has been checked, alone and behind eight files of 50,000 lines
    grammars   a chat with a schema that is new, alone and beside 24 clients whose patterns are refused

The simulated engine behind the real server: no step takes part. A small file may take twice its time alone and 5 s, a
chat with a new schema a second more than alone: one compilation of another key. Exit status 1 for a longer wait.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.common import print_table
from lab.benchmarks.hostile.attacks import ATTACKS, CHAT, FLAGS, KEYS, USER
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.batches import submit_batch, wait_until_it_runs

KEY = "good"
SMALL_LINES, LARGE_LINES, LARGE_FILES = 200, 50_000, 8
TRIES = 5


def lines(count: int) -> bytes:
    body = {"model": "neaptide-tiny", "messages": USER, "max_tokens": 1}
    entry = {"method": "POST", "url": CHAT, "body": body}
    return b"".join(json.dumps(entry | {"custom_id": str(i)}).encode() + b"\n" for i in range(count))


def client(server: ServerProcess, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.base_url, headers={"authorization": f"Bearer {key}"}, timeout=600.0)


async def check_s(http: httpx.AsyncClient, name: str) -> float:
    begun_s = time.perf_counter()
    await wait_until_it_runs(http, await submit_batch(http, f"{name}.jsonl", lines(SMALL_LINES)))
    return time.perf_counter() - begun_s


async def files(server: ServerProcess) -> tuple[float, float, float]:
    """Seconds alone, seconds after the large files, and the largest allowed."""
    async with client(server, KEY) as good, client(server, KEYS["batch"]) as other:
        alone_s = await check_s(good, "first")  # with the start of a process, as the second one's key may need it
        large = [await submit_batch(other, f"large {i}.jsonl", lines(LARGE_LINES)) for i in range(LARGE_FILES)]
        beside_s = await check_s(good, "second")
        for batch in large:
            await other.post(f"/v1/batches/{batch['id']}/cancel")
    return alone_s, beside_s, 2 * alone_s + 5.0


async def schema_s(http: httpx.AsyncClient, number: int) -> float:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
    begun_s = time.perf_counter()
    await http.post(CHAT, json={"messages": USER, "max_tokens": 1, "guided_json": schema})
    return time.perf_counter() - begun_s


async def grammars(server: ServerProcess) -> tuple[float, float, float]:
    """Median seconds alone, with the refused ones, and the largest allowed."""
    attack = ATTACKS["24 clients whose patterns are refused"]

    async def hostile(http: httpx.AsyncClient, first: int) -> None:
        for number in range(first, first + 1_000_000):
            await attack.send(http, number)

    async with client(server, KEY) as good, client(server, KEYS["online"]) as other:
        await schema_s(good, -1)
        alone_s = statistics.median([await schema_s(good, i) for i in range(TRIES)])
        attacking = [asyncio.ensure_future(hostile(other, i * 1_000_000)) for i in range(attack.clients)]
        await asyncio.sleep(2.0)
        beside_s = statistics.median([await schema_s(good, 100 + i) for i in range(TRIES)])
        for task in attacking:
            task.cancel()
        await asyncio.gather(*attacking, return_exceptions=True)
    return alone_s, beside_s, alone_s + 1.0


CASES = {
    "files": (files, ["--executor", "sim"]),
    "grammars": (grammars, []),  # the simulated engine follows none
}


async def measure(name: str) -> tuple[float, float, float]:
    case, flags = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        flags = [*FLAGS, "--api-key", KEY, "--shadow", "off", *flags]
        async with ServerProcess(flags, Path(directory)) as server:
            return await case(server)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME")
    names = parser.parse_args().names or list(CASES)
    os.environ["NEAPTIDE_LOG_LEVEL"] = "warning"
    found = {name: asyncio.run(measure(name)) for name in names}
    rows = [(name, *(f"{value:.2f}" for value in values)) for name, values in found.items()]
    print_table("What another key's queue adds, seconds", ("case", "alone", "behind", "at most"), rows)
    print(json.dumps({name: dict(zip(("alone_s", "behind_s", "most_s"), v, strict=True)) for name, v in found.items()}))
    return 0 if all(behind_s <= most_s for _, behind_s, most_s in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

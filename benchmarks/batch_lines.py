"""Processor time of the API process for a batch line, by the length of the line, and what streams beside it feel.

One server with the sim executor: every step takes a fixed time and nothing is computed, so what is measured is the
server. The model is the embedded one with a longer context. Each batch is uploaded and checked while offline work is
paused; the processor time counts from there until its last line has ended. All answers have the same length, and the
engine runs as many lines at once whatever their length: the time per line should not depend on the line. Part of it is
what the API process spends on each of the engine's steps, and on each commit of results.

    python -m benchmarks.batch_lines [--sizes 500,8000,30000,60000] [--repeats 3] [--chats 10]

With ``--chats`` as many chats a second arrive, first alone and then beside each batch. Prints a table, then one JSON
line.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import EMBEDDED, print_table
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient, open_loop
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.percentiles import percentile

MODEL = "m"
WORDS = """
all and are by can first from in is more of one or that the time to answer compare convert helpful letters minutes model
morning numbers project question reverse seconds smaller subtract weather write
"""
"""Each is one token of the embedded model, which has few words: a line has as many tokens as with a usual tokenizer."""
NUM_SEQS = 4
"""Lines at once: so many of the longest fit into the simulated cache."""
CONTEXT_TOKENS = 65_536
STEP_MS = 1.0
LINE_TOKENS, CHAT_TOKENS = 4, 40
"""Tokens of an answer."""
NUM_LINES = 250
"""Lines of every batch. What the batch itself takes is shared by as many."""
POLL_S = 0.25
ALONE_S, SETTLE_S, IDLE_S = 20.0, 3.0, 5.0
ENGINE_MODULE = "neaptide.launch.serve"
MOST_CHATS = 100_000


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch."""

    line_bytes: int
    api_ms: float
    """Processor time of the API process for a line, from the end of its check on, less what it takes without one."""
    engine_ms: float
    steps: float
    """Steps of the engine for a line."""
    seconds: float
    chats: Sequence[ChatRecord]
    """Those that ended meanwhile."""


def long_model(directory: Path) -> Path:
    """The embedded model, said to have a longer context. Its weights are not computed with."""
    shutil.copytree(EMBEDDED, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    return directory


def batch_file(line_bytes: int, seed: int) -> bytes:
    """Chats of random words, each a line of ``line_bytes``."""
    rng, words = random.Random(seed), WORDS.split()
    lines = []
    for i in range(NUM_LINES):
        message = {"role": "user", "content": ""}
        body = {"model": MODEL, "messages": [message], "max_tokens": LINE_TOKENS, "ignore_eos": True}
        entry = {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        room = max(1, line_bytes - len(json.dumps(entry)) - 1)
        message["content"] = " ".join(rng.choices(words, k=1 + room // 3))[:room]
        lines.append(json.dumps(entry).encode() + b"\n")
    return b"".join(lines)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def engine_of(server: psutil.Process) -> psutil.Process:
    """Raises ValueError where there is none."""
    (engine,) = (child for child in server.children() if ENGINE_MODULE in child.cmdline())
    return engine


async def switch(http: httpx.AsyncClient, state: str) -> None:
    (await http.post("/admin/offline", json={"state": state})).raise_for_status()


async def share_of_a_core(http: httpx.AsyncClient, server: psutil.Process, batch_id: str) -> float:
    """What the API process takes while it is polled, and with the chats that come, but without a batch that runs."""
    now = asyncio.get_running_loop().time
    began_s, before_s = now(), cpu_s(server)
    while now() < began_s + IDLE_S:
        await http.get(f"/v1/batches/{batch_id}")
        await asyncio.sleep(POLL_S)
    return (cpu_s(server) - before_s) / (now() - began_s)


async def num_steps(http: httpx.AsyncClient) -> float:
    """Steps of the engine so far."""
    text = (await http.get("/metrics")).raise_for_status().text
    (line,) = (line for line in text.splitlines() if line.startswith("neaptide_steps_total "))
    return float(line.split()[1])


async def until_status(http: httpx.AsyncClient, batch_id: str, status: str) -> dict[str, Any]:
    """Raises SystemExit where the batch ends otherwise."""
    while True:
        batch: dict[str, Any] = (await http.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
        if batch["status"] == status:
            return batch
        if batch["status"] not in ("validating", "in_progress", "finalizing"):
            raise SystemExit(f"the batch is {batch['status']}: {batch['errors']}")
        await asyncio.sleep(POLL_S)


async def run_batch(
    http: httpx.AsyncClient, server: psutil.Process, chats: Sequence[ChatRecord], line_bytes: int, seed: int
) -> Measured:
    content = batch_file(line_bytes, seed)
    now = asyncio.get_running_loop().time
    await switch(http, "paused")
    upload = await http.post("/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"})
    body = {"input_file_id": upload.raise_for_status().json()["id"], "endpoint": "/v1/chat/completions"}
    batch = (await http.post("/v1/batches", json=body | {"completion_window": "24h"})).raise_for_status().json()
    await until_status(http, batch["id"], "in_progress")
    await asyncio.sleep(SETTLE_S)
    idle_share = await share_of_a_core(http, server, batch["id"])
    engine, began_s, num_before = engine_of(server), now(), len(chats)
    steps_before = await num_steps(http)
    api_before_s, engine_before_s = cpu_s(server), cpu_s(engine)
    await switch(http, "running")
    ended = await until_status(http, batch["id"], "completed")
    api_s, engine_s = cpu_s(server) - api_before_s, cpu_s(engine) - engine_before_s
    api_s -= idle_share * (now() - began_s)
    if ended["request_counts"]["completed"] != NUM_LINES:
        raise SystemExit(f"of {NUM_LINES} lines some failed: {ended['request_counts']}")
    seconds, steps = now() - began_s, await num_steps(http) - steps_before
    api_ms, engine_ms = api_s / NUM_LINES * 1e3, engine_s / NUM_LINES * 1e3
    return Measured(line_bytes, api_ms, engine_ms, steps / NUM_LINES, seconds, chats[num_before:])


@asynccontextmanager
async def steady_chats(client: StreamClient, rate_rps: float) -> AsyncIterator[list[ChatRecord]]:
    """Records of chats as they end; none arrive at a rate of 0."""
    records: list[ChatRecord] = []
    message = [{"role": "user", "content": "What is 21 + 34?"}]
    arrivals = [i / rate_rps for i in range(MOST_CHATS)] if rate_rps else []
    load = asyncio.create_task(
        open_loop(
            arrivals,
            lambda _: client.chat(message, CHAT_TOKENS, ignore_eos=True),
            lambda _, record: records.append(record),
        )
    )
    try:
        yield records
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        if failed := [record.error for record in records if record.error]:
            raise SystemExit(f"{len(failed)} chats failed, the first: {failed[0]}")


async def measure(sizes: Sequence[int], repeats: int, rate_rps: float, directory: Path) -> dict[str, Any]:
    os.environ |= {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": str(STEP_MS)}
    model = long_model(directory / "model")
    flags = [str(model), "--served-model-name", MODEL, "--max-model-len", str(CONTEXT_TOKENS)]
    flags += [
        "--max-num-batched-tokens",
        str(CONTEXT_TOKENS),
        "--max-num-seqs",
        str(NUM_SEQS),
        "--shadow",
        "off",
        "--log-level",
        "warning",
    ]
    async with (
        ServerProcess(flags, directory) as process,
        httpx.AsyncClient(base_url=process.base_url, timeout=600.0) as http,
        StreamClient.beside(http, MODEL) as client,
    ):
        server = psutil.Process(process.pid)
        async with steady_chats(client, rate_rps) as chats:
            await run_batch(http, server, chats, min(sizes), seed=0)  # warms things up
            num_before = len(chats)
            if rate_rps:
                await asyncio.sleep(ALONE_S)
            alone = chats[num_before:]
            found = [
                await run_batch(http, server, chats, size, seed=1 + repeat)
                for repeat in range(repeats)
                for size in sizes
            ]
    return {
        "sizes": [figures_of([one for one in found if one.line_bytes == size]) for size in sizes],
        "chats_alone": tpot_ms(alone),
        "settings": {
            "lines": NUM_LINES,
            "answer_tokens": LINE_TOKENS,
            "step_ms": STEP_MS,
            "repeats": repeats,
            "chats_rps": rate_rps,
        },
    }


def figures_of(runs: Sequence[Measured]) -> dict[str, Any]:
    """Medians of one size."""
    return {
        "line_bytes": runs[0].line_bytes,
        "api_ms_per_line": statistics.median(run.api_ms for run in runs),
        "engine_ms_per_line": statistics.median(run.engine_ms for run in runs),
        "steps_per_line": statistics.median(run.steps for run in runs),
        "lines_per_s": NUM_LINES / statistics.median(run.seconds for run in runs),
        "chats_beside": tpot_ms([record for run in runs for record in run.chats]),
    }


def tpot_ms(records: Sequence[ChatRecord]) -> dict[str, float] | None:
    """None without chats."""
    times = [record.tpot_s * 1e3 for record in records if record.tpot_s is not None]
    return {"chats": len(times), "p50": percentile(times, 0.5), "p99": percentile(times, 0.99)} if times else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="500,8000,30000,60000", help="bytes of a line (500,8000,30000,60000)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="batches of each size (3)")
    parser.add_argument("--chats", type=float, default=0.0, metavar="RPS", help="chats a second beside them (0)")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(sizes, args.repeats, args.chats, Path(directory)))
    rows = [_row(one) for one in found["sizes"]]
    rows.append(["alone", "", "", "", "", *_shown(found["chats_alone"])])
    titles = ["line bytes", "API ms/line", "engine ms/line", "steps/line", "lines/s", "TPOT p50 ms", "p99 ms"]
    print_table("Processor time of a batch line", titles, rows)
    print(json.dumps(found, allow_nan=False))


def _row(one: dict[str, Any]) -> list[str]:
    figures = (
        f"{one[name]:.2f}" for name in ("api_ms_per_line", "engine_ms_per_line", "steps_per_line", "lines_per_s")
    )
    return [f"{one['line_bytes']:,}", *figures, *_shown(one["chats_beside"])]


def _shown(times: dict[str, float] | None) -> list[str]:
    return ["", ""] if times is None else [f"{times['p50']:.2f}", f"{times['p99']:.2f}"]


if __name__ == "__main__":
    main()

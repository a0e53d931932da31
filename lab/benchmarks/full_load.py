"""A batch of 50,000 lines, 200 MB, beside a steady load of chats: how long until it runs, and which requests feel it.

One server with the sim executor (every step takes a fixed time, nothing is computed), so what is measured is
everything around the model. Chats arrive at a steady rate throughout; phases of one run: before, upload and
validation, while lines run, and after the batch has been cancelled. Prints tables, then one JSON line.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import print_table
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient, open_loop
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.percentiles import percentile

WORDS = """
the of and to in is for that with as on by at from this be or are an which have not but all one can more time people
number question answer sum result first second write explain system data network model table value between after
before where there about would other into some only new over such
"""
STEP_MS = 20.0
CHAT_TOKENS = 40
LIMIT_S = 60.0
MOST_TPOT_RATIO = 1.2


@dataclass(frozen=True, slots=True)
class Plan:
    lines: int
    line_bytes: int
    rate_rps: float
    phase_s: float
    """Length of the phases before and after the batch."""


@dataclass(slots=True)
class Usage:
    """Peak resident memory and processor time of the server's processes, sampled ten times a second."""

    root: psutil.Process
    peak_bytes: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    async def watch(self) -> None:
        while True:
            for process in [self.root, *self.root.children()]:
                try:
                    command, rss_bytes, cpu = (
                        " ".join(process.cmdline()),
                        process.memory_info().rss,
                        process.cpu_times(),
                    )
                except psutil.Error:
                    continue
                name = {"launch": "engine", "worker": "worker"}.get(_module(command), "API")
                self.cpu_s[name] = cpu.user + cpu.system
                self.peak_bytes[name] = max(rss_bytes, self.peak_bytes.get(name, 0))
            await asyncio.sleep(0.1)


def _module(command: str) -> str:
    return next((name for name in ("launch", "worker") if f".{name} " in f"{command} "), "")


def file_lines(plan: Plan) -> Iterator[bytes]:
    """Chats of random words, each line of ``line_bytes``."""
    rng, words = random.Random(1), WORDS.split()
    for i in range(plan.lines):
        messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": ""}]
        body = {"model": "neaptide-tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 16}
        entry = {"custom_id": f"request-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        room = plan.line_bytes - len(json.dumps(entry)) - 1
        messages[1]["content"] = " ".join(rng.choices(words, k=room // 3))[:room]
        yield json.dumps(entry).encode() + b"\n"


async def submit(plan: Plan, http: httpx.AsyncClient, path: Path, now: Any) -> tuple[str, dict[str, float]]:
    """Uploads, creates, waits until the first line has begun to run; returns the batch and seconds of each stage."""
    start_s = now()
    with path.open("rb") as f:
        upload = await http.post("/v1/files", files={"file": ("lines.jsonl", f)}, data={"purpose": "batch"})
    body = {
        "input_file_id": upload.raise_for_status().json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    uploaded_s = now()
    batch = (await http.post("/v1/batches", json=body)).raise_for_status().json()
    accepted_s = now()
    while batch["status"] == "validating":
        await asyncio.sleep(0.1)
        batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    if batch["status"] != "in_progress":
        raise SystemExit(f"the batch is {batch['status']}: {batch['errors']}")
    valid_s = now()
    while batch["request_counts"]["completed"] == 0:
        await asyncio.sleep(0.05)
        batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    stages = {
        "upload_s": uploaded_s - start_s,
        "create_s": accepted_s - uploaded_s,
        "validate_s": valid_s - accepted_s,
        "first_line_done_s": now() - valid_s,
        "total_s": now() - start_s,
    }
    return batch["id"], stages


async def measure(plan: Plan, directory: Path) -> dict[str, Any]:
    """Raises SystemExit when a chat fails or the batch does."""
    path = directory / "lines.jsonl"
    with path.open("wb") as f:
        f.writelines(file_lines(plan))
    os.environ |= {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": str(STEP_MS)}
    now = asyncio.get_running_loop().time
    records: list[ChatRecord] = []
    edges_s: list[float] = []
    server = ServerProcess(["--log-level", "warning"], directory / "data")
    async with (
        server,
        httpx.AsyncClient(base_url=server.base_url, timeout=600.0) as http,
        StreamClient.beside(http, "neaptide-tiny") as client,
    ):
        usage = Usage(_server_process())
        watching = asyncio.create_task(usage.watch())
        message = [{"role": "user", "content": "What is 21 + 34?"}]
        count = int(plan.rate_rps * 1000)
        load = asyncio.create_task(
            open_loop(
                [i / plan.rate_rps for i in range(count)],
                lambda i: client.chat(message, CHAT_TOKENS, ignore_eos=True),
                lambda i, record: records.append(record),
            )
        )
        await asyncio.sleep(3.0)  # the first requests warm things up
        edges_s.append(now())
        await asyncio.sleep(plan.phase_s)
        edges_s.append(now())
        batch_id, stages = await submit(plan, http, path, now)
        edges_s.append(now())
        await asyncio.sleep(plan.phase_s)
        batch = (await http.get(f"/v1/batches/{batch_id}")).json()
        edges_s.append(now())
        (await http.post(f"/v1/batches/{batch_id}/cancel")).raise_for_status()
        await _until_cancelled(http, batch_id)
        edges_s.append(now())
        await asyncio.sleep(plan.phase_s)
        edges_s.append(now())
        for task in (load, watching):
            task.cancel()
        await asyncio.gather(load, watching, return_exceptions=True)
    if failed := [r.error for r in records if r.error]:
        raise SystemExit(f"{len(failed)} chats failed, the first: {failed[0]}")
    names = ("before", "upload and validation", "batch running", "cancelling", "after")
    phases = {n: _phase(records, b, e) for n, b, e in zip(names, edges_s[:-1], edges_s[1:], strict=True)}
    quiet_ms = phases["before"]["tpot_p99_ms"]
    return {
        "stages": {name: round(value, 2) for name, value in stages.items()},
        "lines_per_s_while_running": round(batch["request_counts"]["completed"] / plan.phase_s, 1),
        "phases": phases,
        "tpot_p99_ratio": {n: round(p["tpot_p99_ms"] / quiet_ms, 3) for n, p in phases.items() if n != "before"},
        "peak_rss_mb": {name: round(value / 1e6) for name, value in sorted(usage.peak_bytes.items())},
        "cpu_s": {name: round(value, 1) for name, value in sorted(usage.cpu_s.items())},
        "plan": {"lines": plan.lines, "bytes": path.stat().st_size, "rate_rps": plan.rate_rps, "step_ms": STEP_MS},
    }


async def _until_cancelled(http: httpx.AsyncClient, batch_id: str) -> None:
    batch: dict[str, Any] = {"status": "cancelling"}
    while batch["status"] == "cancelling":
        await asyncio.sleep(0.2)
        batch = (await http.get(f"/v1/batches/{batch_id}")).json()


def _server_process() -> psutil.Process:
    (server,) = (p for p in psutil.Process().children() if "serve" in p.cmdline())
    return server


def _phase(records: list[ChatRecord], begin_s: float, end_s: float) -> dict[str, Any]:
    """Figures of the chats that began and ended inside the phase."""
    inside = [r for r in records if begin_s <= r.sent_s and r.end_s <= end_s]
    tpot_ms = [1e3 * r.tpot_s for r in inside if r.tpot_s is not None]
    ttft_ms = [1e3 * r.ttft_s for r in inside if r.ttft_s is not None]
    gaps_ms = [1e3 * (b - a) for r in inside for a, b in zip(r.token_times_s, r.token_times_s[1:], strict=False)]
    values = {
        "tpot_p50_ms": percentile(tpot_ms, 0.5),
        "tpot_p99_ms": percentile(tpot_ms, 0.99),
        "ttft_p99_ms": percentile(ttft_ms, 0.99),
        "longest_gap_ms": max(gaps_ms, default=float("nan")),
    }
    return {"seconds": round(end_s - begin_s, 1), "chats": len(inside)} | {k: round(v, 2) for k, v in values.items()}


def print_result(result: dict[str, Any]) -> None:
    ratios = result["tpot_p99_ratio"]
    rows = [[name, *phase.values(), ratios.get(name, 1.0)] for name, phase in result["phases"].items()]
    columns = ["phase", "s", "chats", "TPOT p50 ms", "p99", "TTFT p99 ms", "longest gap ms", "TPOT p99 ratio"]
    print_table("chats beside the batch", columns, rows)
    print_table("the batch", ["stage", "seconds"], [[k.removesuffix("_s"), v] for k, v in result["stages"].items()])
    processes = [[name, value, result["cpu_s"][name]] for name, value in result["peak_rss_mb"].items()]
    print_table("processes", ["process", "peak resident MB", "processor s"], processes)
    in_time = result["stages"]["total_s"] <= LIMIT_S
    verdict = "holds" if in_time and ratios["upload and validation"] <= MOST_TPOT_RATIO else "does not hold"
    print(f"running within {LIMIT_S:.0f} s and p99 TPOT within {MOST_TPOT_RATIO - 1:.0%}: {verdict}")
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--line-bytes", type=int, default=4_000)
    parser.add_argument("--rate", type=float, default=4.0, help="chats per second")
    parser.add_argument("--phase-s", type=float, default=30.0)
    args = parser.parse_args()
    plan = Plan(args.lines, args.line_bytes, args.rate, args.phase_s)
    with tempfile.TemporaryDirectory() as directory:
        print_result(asyncio.run(measure(plan, Path(directory))))


if __name__ == "__main__":
    main()

"""``neaptide demo``: a batch file and live chat on one engine, and whether the answers are right."""

import argparse
import asyncio
import json
import random
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from neaptide.commands.demo_view import SERIES, DemoView, View, plain_view
from neaptide.commands.server_process import ServerDiedError, ServerProcess
from neaptide.data import skills
from neaptide.loadgen.client.batches import TERMINAL, get_batch, submit_batch
from neaptide.loadgen.client.client import StreamClient, open_loop, poisson_arrivals
from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.recorder import Record
from neaptide.loadgen.percentiles import percentiles

TTFT_SLO_MS = 1000.0
TPOT_SLO_MS = 100.0
MAX_TOKENS = 96
SHOTS = 6
PREFIX_SKILLS = ("add", "subtract", "compare", "upper", "reverse", "spell")
TICK_S = 0.5
DATA_DIR = "demo-data"
NO_COUNTS = {"total": 0, "completed": 0, "failed": 0}


@dataclass(slots=True)
class DemoState:
    """What the view shows."""

    batch: dict[str, Any] = field(default_factory=lambda: {"status": "not submitted", "request_counts": NO_COUNTS})
    metrics: Samples = field(default_factory=lambda: Samples(""))
    chats: list[tuple[skills.Example, Record]] = field(default_factory=list)
    elapsed_s: float = 0.0
    submitted_s: float = 0.0
    """When the batch was submitted; until then there is only chat."""

    def records(self, *, beside_batch: bool) -> list[Record]:
        return [r for _, r in self.chats if (r.arrival_s >= self.submitted_s) is beside_batch]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("demo", help="chat live while a batch file is worked off, on the embedded model")
    parser.add_argument("--lines", type=int, default=300, help="lines in the batch file (300)")
    parser.add_argument("--rate", type=float, default=3.0, help="chat requests per second, Poisson arrivals (3)")
    parser.add_argument("--max-seconds", type=float, default=80.0, help="stop after so long, done or not (80)")
    parser.add_argument("--lead-seconds", type=float, default=8.0, help="chat alone so long before the batch (8)")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="where the files of the run go (.demo)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    shutil.rmtree(args.dir / DATA_DIR, ignore_errors=True)
    args.dir.mkdir(parents=True, exist_ok=True)
    try:
        return asyncio.run(_demo(args, Console()))
    except (ServerDiedError, httpx.HTTPError) as error:
        print(f"neaptide demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_batch(lines: int, seed: int) -> list[skills.Example]:
    """Single questions of every skill, and every other line one behind a few-shot prefix that its skill shares."""
    rng = random.Random(seed)
    examples = []
    for index in range(lines):
        names = PREFIX_SKILLS if index % 2 else skills.SKILLS
        example = skills.single(names[index // 2 % len(names)], rng, held_out=True)
        if index % 2:
            prefix = skills.shared_prefix(example.skill, SHOTS)
            example = skills.Example(example.skill, [*prefix, *example.messages], example.answer)
        examples.append(example)
    return examples


def batch_jsonl(examples: list[skills.Example]) -> bytes:
    lines = []
    for index, example in enumerate(examples):
        body = {"model": "neaptide-tiny", "messages": example.messages, "temperature": 0}
        body["max_completion_tokens"] = MAX_TOKENS
        line = {"custom_id": f"line-{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    return ("\n".join(lines) + "\n").encode()


async def _demo(args: argparse.Namespace, console: Console) -> int:
    examples = make_batch(args.lines, args.seed)
    deadline_s = time.monotonic() + args.max_seconds
    flags = ["--ttft-slo-ms", str(TTFT_SLO_MS), "--tpot-slo-ms", str(TPOT_SLO_MS)]
    console.print("starting the server on the embedded model ...")
    async with ServerProcess(flags, args.dir / DATA_DIR) as server:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=120.0) as http:
            state = DemoState()
            view = DemoView(console, TTFT_SLO_MS, TPOT_SLO_MS) if console.is_interactive else plain_view(console)
            chats = asyncio.create_task(_chat(http, state, args))
            try:
                with view:
                    await _watch(http, state, view, min(deadline_s, time.monotonic() + args.lead_seconds))
                    state.submitted_s = state.elapsed_s
                    state.batch = await submit_batch(http, "demo.jsonl", batch_jsonl(examples))
                    await _watch(http, state, view, deadline_s)
                if chats.done():
                    chats.result()  # a fault of the client is not an empty success
            finally:
                chats.cancel()
                await asyncio.gather(chats, return_exceptions=True)
            return await _report(http, state, examples, args.dir, console)


async def _chat(http: httpx.AsyncClient, state: DemoState, args: argparse.Namespace) -> None:
    """People asking one question each, at random moments, for as long as the demo lasts."""
    client = StreamClient(http, "neaptide-tiny")
    rng = random.Random(args.seed + 1)
    arrivals = poisson_arrivals(args.rate, args.max_seconds, args.seed)
    questions = [skills.single(rng.choice(skills.SKILLS), rng, held_out=True) for _ in arrivals]
    await open_loop(
        arrivals,
        lambda i: client.chat(questions[i].messages, MAX_TOKENS),
        lambda i, record: state.chats.append((questions[i], record)),
    )


async def _watch(http: httpx.AsyncClient, state: DemoState, view: View, deadline_s: float) -> None:
    """Shows what happens until the batch has ended or the time is up."""
    start_s = time.monotonic() - state.elapsed_s
    while time.monotonic() < deadline_s:
        if "id" in state.batch:
            state.batch = await get_batch(http, state.batch["id"])
        state.metrics = Samples((await http.get("/metrics")).text, SERIES)
        state.elapsed_s = time.monotonic() - start_s
        view.update(state)
        if state.batch["status"] in TERMINAL:
            return
        await asyncio.sleep(TICK_S)


async def _report(
    http: httpx.AsyncClient, state: DemoState, examples: list[skills.Example], directory: Path, console: Console
) -> int:
    """Prints what was right; 0 if the batch was completed."""
    batch = state.batch
    if batch["status"] != "completed":
        counts = batch["request_counts"]
        console.print(f"the batch is {batch['status']} after {state.elapsed_s:.0f} s: {counts}")
        return 1
    results_path = directory / "results.jsonl"
    content = b""
    for file_id in (batch["output_file_id"], batch["error_file_id"]):
        if file_id is not None:
            content += (await http.get(f"/v1/files/{file_id}/content")).content
    results_path.write_bytes(content)
    answers = {}
    for line in map(json.loads, content.splitlines()):
        if line["response"] is not None and line["response"]["status_code"] == 200:
            answers[line["custom_id"]] = line["response"]["body"]["choices"][0]["message"]["content"]
    right = sum(skills.is_correct(e, answers.get(f"line-{i}", "")) for i, e in enumerate(examples))
    took_s = state.elapsed_s - state.submitted_s
    console.print(f"batch: {right} of {len(examples)} answers exactly right, in {took_s:.1f} s")
    chat_right = sum(skills.is_correct(example, record.text) for example, record in state.chats)
    console.print(f"chat:  {chat_right} of {len(state.chats)} answers exactly right")
    for label, beside_batch in (("alone", False), ("beside the batch", True)):
        records = state.records(beside_batch=beside_batch)
        met = sum(r.met(TTFT_SLO_MS / 1e3, TPOT_SLO_MS / 1e3) for r in records)
        ttft, tpot = percentiles([r.ttft_s for r in records]), percentiles([r.tpot_s for r in records])
        console.print(
            f"       {label}: {met} of {len(records)} within both targets; "
            f"TTFT p50/p99 {ttft.p50 * 1e3:.0f}/{ttft.p99 * 1e3:.0f} ms, "
            f"TPOT {tpot.p50 * 1e3:.0f}/{tpot.p99 * 1e3:.0f} ms",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"results: {results_path}")
    return 0

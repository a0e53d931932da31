"""``neaptide demo``: a batch file and live chat on one engine, with a check of the answers.

One server, three phases. First a batch without chat, then chat without a batch, a few seconds each, to measure both
alone. Then a batch sized from these measurements, together with chat.
"""

import argparse
import asyncio
import contextlib
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from neaptide.commands.demo.forms import FORMED, answer_of
from neaptide.commands.demo.lines import MAX_TOKENS, MODEL, batch_jsonl, line_tokens, make_batch, right_answers
from neaptide.commands.demo.state import (
    BOTH,
    CHAT_ALONE,
    SERIES,
    TPOT_SLO_MS,
    TTFT_SLO_MS,
    DemoState,
    Moment,
    rates_per_s,
)
from neaptide.commands.demo.verdict import DemoFigures, lines_for, sentence, unfinished
from neaptide.commands.demo.view import View, view_for
from neaptide.commands.server_process import ServerDiedError, ServerProcess
from neaptide.data import skills
from neaptide.launch.early_checks import check_parts
from neaptide.loadgen.client.batches import TERMINAL, get_batch, submit_batch
from neaptide.loadgen.client.client import StreamClient, open_loop, poisson_arrivals
from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.proxies import mounts_for
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.percentiles import percentiles
from neaptide.server.settings import EMBEDDED_MODEL, Settings

BOTH_S = 18.0
"""Computing time of the batch next to chat; checking its lines and writing its results take longer."""
START_S = 900.0
"""Wait for the server; a model of the hub is downloaded first."""
BATCH_ALONE_S = 2.5
PROBE_LINES = 1500
"""More lines than fit into that time; the batch is cancelled."""
PATIENCE_S = 3.0
"""Wait for chats that have not ended when the batch has."""
SAMPLED_ROUNDS = 8
"""Rounds of lines of every kind, to estimate a line's cost."""
LEAST_RIGHT = 0.9
"""Required fraction of correct batch answers: the model itself is sometimes wrong."""
TICK_S = 0.5
DATA_DIR = "demo-data"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("demo", help="chat while a batch file runs, on the embedded model")
    about = "directory or hub id of another model; its answers are shown and need not be right"
    parser.add_argument("--model", default=EMBEDDED_MODEL, help=f"{about} ({EMBEDDED_MODEL})")
    parser.add_argument("--lines", type=int, help="lines in the batch file (by default about 20 s of work)")
    parser.add_argument("--rate", type=float, default=3.0, help="chat requests per second, Poisson arrivals (3)")
    parser.add_argument("--max-seconds", type=float, default=80.0, help="stop after this many seconds (80)")
    parser.add_argument("--lead-seconds", type=float, default=4.0, help="seconds of chat alone before the batch (4)")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="directory for the files of the run (.demo)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    check_parts(Settings(model=args.model))
    shutil.rmtree(args.dir / DATA_DIR, ignore_errors=True)
    args.dir.mkdir(parents=True, exist_ok=True)
    try:
        return asyncio.run(_demo(args, Console()))
    except (ServerDiedError, httpx.HTTPError) as error:
        print(f"neaptide demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


@dataclass(slots=True)
class _Stage:
    """Objects that all phases share."""

    http: httpx.AsyncClient
    streams: StreamClient
    state: DemoState
    view: View
    start_s: float
    deadline_s: float
    """Like ``start_s``, on the monotonic clock."""

    async def look(self) -> None:
        """Scrapes the server once and shows the result."""
        if "id" in self.state.batch:
            self.state.batch = await get_batch(self.http, self.state.batch["id"])
        metrics = Samples((await self.http.get("/metrics")).text, SERIES)
        self.state.saw(metrics, time.monotonic() - self.start_s)
        self.view.update(self.state)

    async def watch(self, seconds: float = float("inf")) -> None:
        """Shows progress until the batch has ended or the time is up."""
        until_s = min(self.deadline_s, time.monotonic() + seconds)
        while True:
            await self.look()
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self.state.batch["status"] in TERMINAL:
                return
            await asyncio.sleep(min(TICK_S, left_s))


async def _demo(args: argparse.Namespace, console: Console) -> int:
    flags = [args.model, "--served-model-name", MODEL]
    flags += ["--ttft-slo-ms", str(TTFT_SLO_MS), "--tpot-slo-ms", str(TPOT_SLO_MS)]
    console.print(f"starting the server on {args.model} ...", highlight=False)
    async with ServerProcess(flags, args.dir / DATA_DIR, START_S) as server:
        async with (
            httpx.AsyncClient(base_url=server.base_url, timeout=120.0, mounts=mounts_for(server.base_url)) as http,
            StreamClient.beside(http, MODEL) as streams,
        ):
            start_s = time.monotonic()
            stage = _Stage(http, streams, DemoState(), view_for(console), start_s, start_s + args.max_seconds)
            with stage.view:
                await _batch_alone(stage, args.seed)
                async with _chatting(stage, args) as arrivals:
                    stage.state.act = CHAT_ALONE
                    await stage.watch(args.lead_seconds)
                    examples, content = await sized_batch(stage.state, args)
                    began, ended = await _both(stage, content)
                    await _last_chats(stage, arrivals)
            return await _report(stage, examples, (began, ended), args, console)


async def _batch_alone(stage: _Stage, seed: int) -> None:
    """Runs a batch without chat and cancels it once its speed is known. It also fills the prefix cache."""
    state = stage.state
    state.batch = await submit_batch(stage.http, "alone.jsonl", batch_jsonl(make_batch(PROBE_LINES, seed + 2)))
    while True:
        await stage.look()
        if state.moments[-1].offline_tokens or state.batch["status"] in TERMINAL or time.monotonic() > stage.deadline_s:
            break
        await asyncio.sleep(TICK_S / 2)
    first = state.moments[-1]
    await stage.watch(BATCH_ALONE_S)
    state.batch_alone_per_s = rates_per_s(first, state.moments[-1])[1]
    if state.batch["status"] not in TERMINAL:
        await stage.http.post(f"/v1/batches/{state.batch['id']}/cancel")
        await stage.watch(BATCH_ALONE_S)
    state.batch = DemoState().batch


@contextlib.asynccontextmanager
async def _chatting(stage: _Stage, args: argparse.Namespace) -> AsyncIterator[list[float]]:
    """Sends one question per simulated user, at random moments, until the context ends. Yields the arrival times."""
    state = stage.state
    rng = random.Random(args.seed + 1)
    arrivals = poisson_arrivals(args.rate, max(stage.deadline_s - time.monotonic(), TICK_S), args.seed)
    questions = [skills.single(rng.choice(skills.SKILLS), rng, held_out=True) for _ in arrivals]
    state.chat_start_s = time.monotonic() - stage.start_s
    chats = asyncio.create_task(
        open_loop(
            arrivals,
            lambda i: stage.streams.chat(questions[i].messages, MAX_TOKENS),
            lambda i, record: state.chats.append((questions[i], record)),
        )
    )
    try:
        yield arrivals
        if chats.done():
            chats.result()  # an error of the client must not look like an empty success
    finally:
        chats.cancel()
        await asyncio.gather(chats, return_exceptions=True)


async def sized_batch(state: DemoState, args: argparse.Namespace) -> tuple[list[skills.Example], bytes]:
    """The requested number of lines, or as many as take ``BOTH_S`` next to chat, estimated from the measurements; and
    their file.

    This takes about a second, in threads, so that chats continue.
    """
    examples = await asyncio.to_thread(_sized, state, args)
    return examples, await asyncio.to_thread(batch_jsonl, examples)


def _sized(state: DemoState, args: argparse.Namespace) -> list[skills.Example]:
    if args.lines is not None:
        return make_batch(args.lines, args.seed)
    since = [moment for moment in state.moments if moment.elapsed_s >= state.chat_start_s]
    chat_per_s = rates_per_s(since[0], since[-1])[0]
    sample = line_tokens(make_batch(2 * len(skills.SKILLS) * SAMPLED_ROUNDS, args.seed))
    return make_batch(lines_for(BOTH_S, state.batch_alone_per_s, chat_per_s, sample), args.seed)


async def _both(stage: _Stage, content: bytes) -> tuple[Moment, Moment]:
    """Runs the batch together with chat. Returns the moments of its begin and end."""
    state = stage.state
    state.act = BOTH
    await stage.look()
    began = state.moments[-1]
    state.both_start_s = began.elapsed_s
    state.batch = await submit_batch(stage.http, "demo.jsonl", content)
    await stage.watch()
    return began, state.moments[-1]


async def _last_chats(stage: _Stage, arrivals: list[float]) -> None:
    """Waits for chats that arrived before the batch ended. Chats still unfinished after that count as missed."""
    state = stage.state
    due = {at_s for at_s in arrivals if state.chat_start_s + at_s <= state.elapsed_s}
    until_s = time.monotonic() + PATIENCE_S
    while missing := due - {record.arrival_s for _, record in state.chats}:
        if time.monotonic() > until_s:
            break
        await asyncio.sleep(TICK_S / 5)
    state.chats = [(example, record) for example, record in state.chats if record.arrival_s in due]
    unfinished = skills.Example("", [], "an answer")
    state.chats += [(unfinished, ChatRecord(0.0, arrival_s=at_s, error="unfinished")) for at_s in sorted(missing)]


async def _report(
    stage: _Stage,
    examples: list[skills.Example],
    both: tuple[Moment, Moment],
    args: argparse.Namespace,
    console: Console,
) -> int:
    """Prints the correct answers and the benefit of co-serving. Returns 0 if the batch was completed, and correctly by
    the embedded model, which was taught these questions."""
    state = stage.state
    if state.batch["status"] != "completed":
        console.print(unfinished(state.batch, state.elapsed_s), highlight=False, soft_wrap=True)
        return 1
    results = b""
    for file_id in (state.batch["output_file_id"], state.batch["error_file_id"]):
        if file_id is not None:
            results += (await stage.http.get(f"/v1/files/{file_id}/content")).content
    results_path = args.dir / "results.jsonl"
    results_path.write_bytes(results)
    right = right_answers(examples, results)
    together_s = both[1].elapsed_s - both[0].elapsed_s
    console.print(f"batch: {right} of {len(examples)} answers exactly right, in {together_s:.1f} s")
    chat_right = sum(skills.is_correct(example, record.text) for example, record in state.chats)
    console.print(f"chat:  {chat_right} of {len(state.chats)} answers exactly right")
    met = {beside: _print_chats(state, console, beside_batch=beside) for beside in (False, True)}
    measured = DemoFigures(
        together_s, both[1].offline_tokens - both[0].offline_tokens, state.batch_alone_per_s, *met[False], *met[True]
    )
    was_taught = args.model == EMBEDDED_MODEL
    formed_right = not was_taught or await _print_formed(stage.http, console)
    console.print(f"results: {results_path}")
    console.print(sentence(measured), highlight=False, soft_wrap=True)
    if was_taught and right < LEAST_RIGHT * len(examples):
        console.print(f"the result is wrong: fewer than {LEAST_RIGHT:.0%} of the batch's answers are right")
        return 1
    return 0 if formed_right else 1


async def _print_formed(http: httpx.AsyncClient, console: Console) -> bool:
    """Prints a forced tool call and a JSON answer. Returns whether both are right."""
    answers = [await answer_of(http, formed) for formed in FORMED]
    for formed, answer in zip(FORMED, answers, strict=True):
        verdict = "right" if answer == formed.answer else "wrong"
        line = f"form:  {formed.question} {' '.join(answer.split())} ({verdict})"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return answers == [formed.answer for formed in FORMED]


def _print_chats(state: DemoState, console: Console, *, beside_batch: bool) -> tuple[int, int]:
    """Prints the latencies of chats with or without the batch. Returns how many met both targets, and of how many."""
    records = state.records(beside_batch=beside_batch)
    met = sum(r.met(TTFT_SLO_MS / 1e3, TPOT_SLO_MS / 1e3) for r in records)
    ttft, tpot = percentiles([r.ttft_s for r in records]), percentiles([r.tpot_s for r in records])
    console.print(
        f"       {'with the batch' if beside_batch else 'alone'}: {met} of {len(records)} within both targets; "
        f"TTFT p50/p99 {ttft.p50 * 1e3:.0f}/{ttft.p99 * 1e3:.0f} ms, "
        f"TPOT {tpot.p50 * 1e3:.0f}/{tpot.p99 * 1e3:.0f} ms",
        highlight=False,
        soft_wrap=True,
    )
    return met, len(records)

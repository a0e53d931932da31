"""``neaptide demo``: a batch file and live chat on one engine, with a check of the answers.

One server, four phases. A few chats one after another set the load that this machine can bear. A batch without chat,
then chat without a batch, a few seconds each, measure both alone. Then a batch sized from these measurements runs
together with chat. Every phase is bounded: the demo ends on a machine of any speed, and says how far it came.
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
from neaptide.commands.demo.lines import (
    MAX_TOKENS,
    MODEL,
    answers_of,
    batch_jsonl,
    line_tokens,
    make_batch,
    right_answers,
)
from neaptide.commands.demo.load import LEAST_TOKENS, RATE_PER_S, fit_load, lines_to_measure
from neaptide.commands.demo.state import BATCH_ALONE, BOTH, CHAT_ALONE, SERIES, DemoState, Moment, rates_per_s
from neaptide.commands.demo.verdict import DemoFigures, lines_for, scaled, sentence, too_slow, unfinished
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
ONE_CHAT_S, CHATS_ALONE = 4.0, 3
"""The first phase ends after this time or this many chats."""
SHARE_OF_PHASE = 0.25
"""Largest share of the demo's time that one phase before the last takes."""
BATCH_ALONE_S = 2.5
PROBE_LINES = 1500
"""More lines than fit into that time; the batch is cancelled."""
PATIENCE_S = 3.0
"""Wait for chats that have not ended when the batch has, and twice an answer's time where that is longer."""
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
    parser.add_argument(
        "--lines",
        type=_at_least_one,
        help="lines in the batch file (by default about 20 s of work)",
    )
    rate = f"chat requests per second, Poisson arrivals (by default {RATE_PER_S:.0f}, fewer on a slow machine)"
    parser.add_argument("--rate", type=_above_zero, help=rate)
    parser.add_argument("--max-seconds", type=_above_zero, default=80.0, help="stop after this many seconds (80)")
    parser.add_argument(
        "--lead-seconds", type=_above_zero, default=4.0, help="seconds of chat alone before the batch (4)"
    )
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="directory for the files of the run (.demo)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(func=run)


def _above_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _at_least_one(text: str) -> int:
    if text.isdecimal() and (value := int(text)) > 0:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


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

    def phase_s(self, seconds: float) -> float:
        """``seconds``, but not more of the time that is left than a phase may take."""
        return min(seconds, SHARE_OF_PHASE * max(self.deadline_s - time.monotonic(), TICK_S))

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
    console.print(f"starting the server on {args.model} ...", highlight=False)
    async with ServerProcess(flags, args.dir / DATA_DIR, START_S) as server:
        async with (
            httpx.AsyncClient(base_url=server.base_url, timeout=120.0, mounts=mounts_for(server.base_url)) as http,
            StreamClient.beside(http, MODEL) as streams,
        ):
            start_s = time.monotonic()
            stage = _Stage(http, streams, DemoState(), view_for(console), start_s, start_s + args.max_seconds)
            alone = await _one_chat_at_a_time(stage, args)
            if not alone:
                console.print(too_slow(args.max_seconds), highlight=False, soft_wrap=True)
                return 1
            stage.state.load = load = fit_load(alone, args.rate, is_taught=args.model == EMBEDDED_MODEL)
            if load.is_scaled:
                console.print(scaled(load), highlight=False, soft_wrap=True)
            with stage.view:
                await _batch_alone(stage, args.seed)
                async with _chatting(stage, args) as arrivals:
                    stage.state.act = CHAT_ALONE
                    await stage.watch(stage.phase_s(max(args.lead_seconds, 4.0 / load.rate_per_s)))
                    examples, content = await sized_batch(stage.state, args, stage.deadline_s - time.monotonic())
                    began, ended = await _both(stage, content)
                    await _last_chats(stage, arrivals)
            return await _report(stage, examples, (began, ended), args, console)


async def _one_chat_at_a_time(stage: _Stage, args: argparse.Namespace) -> list[ChatRecord]:
    """A few chats on the idle server. The first one warms it up, and counts only if there is no other."""
    rng = random.Random(args.seed + 3)
    max_tokens = MAX_TOKENS if args.model == EMBEDDED_MODEL else 2 * LEAST_TOKENS
    records: list[ChatRecord] = []
    began_s = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(args.max_seconds / 2):
            while len(records) <= CHATS_ALONE and time.monotonic() - began_s < ONE_CHAT_S:
                question = skills.single(rng.choice(skills.SKILLS), rng, held_out=True)
                record = await stage.streams.chat(question.messages, max_tokens)
                if record.error is not None:
                    raise ServerDiedError(f"a chat failed: {record.error}")
                records.append(record)
    return records[1:] or records


async def _batch_alone(stage: _Stage, seed: int) -> None:
    """Runs a batch without chat and cancels it once its speed is known. It also fills the prefix cache."""
    state, load = stage.state, stage.state.load
    state.act = BATCH_ALONE
    sample = line_tokens(make_batch(2 * len(skills.SKILLS), seed + 2))
    lines = lines_to_measure(load, 2 * BATCH_ALONE_S, sum(sample) / len(sample), PROBE_LINES)
    content = batch_jsonl(make_batch(lines, seed + 2), load.max_tokens)
    state.batch = await submit_batch(stage.http, "alone.jsonl", content)
    until_s = time.monotonic() + stage.phase_s(stage.deadline_s - time.monotonic())
    while True:
        await stage.look()
        if state.moments[-1].offline_tokens or state.batch["status"] in TERMINAL or time.monotonic() > until_s:
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
    load = state.load
    arrivals = poisson_arrivals(load.rate_per_s, max(stage.deadline_s - time.monotonic(), TICK_S), args.seed)
    questions = [skills.single(rng.choice(skills.SKILLS), rng, held_out=True) for _ in arrivals]
    state.chat_start_s = time.monotonic() - stage.start_s
    chats = asyncio.create_task(
        open_loop(
            arrivals,
            lambda i: stage.streams.chat(questions[i].messages, load.max_tokens, **load.targets),
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


async def sized_batch(state: DemoState, args: argparse.Namespace, left_s: float) -> tuple[list[skills.Example], bytes]:
    """The requested number of lines, or as many as take ``BOTH_S`` next to chat, and half of the seconds left at most,
    estimated from the measurements; and their file.

    This takes about a second, in threads, so that chats continue.
    """
    examples = await asyncio.to_thread(_sized, state, args, left_s)
    return examples, await asyncio.to_thread(batch_jsonl, examples, state.load.max_tokens)


def _sized(state: DemoState, args: argparse.Namespace, left_s: float) -> list[skills.Example]:
    if args.lines is not None:
        return make_batch(args.lines, args.seed)
    since = [moment for moment in state.moments if moment.elapsed_s >= state.chat_start_s]
    chat_per_s = rates_per_s(since[0], since[-1])[0]
    answer_tokens = None if args.model == EMBEDDED_MODEL else state.load.max_tokens
    sample = line_tokens(make_batch(2 * len(skills.SKILLS) * SAMPLED_ROUNDS, args.seed), answer_tokens)
    return make_batch(lines_for(min(BOTH_S, left_s / 2), state.batch_alone_per_s, chat_per_s, sample), args.seed)


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
    until_s = time.monotonic() + max(PATIENCE_S, 2 * state.load.answer_s)
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
    """Prints the answers and the benefit of co-serving. A batch that the time did not suffice for is cancelled, and
    counts as far as it came. Returns 1 if it failed, or wrong answers came from the embedded model, which was taught
    these questions."""
    state = stage.state
    if state.batch["status"] not in TERMINAL:
        console.print(unfinished(state.batch, state.elapsed_s), highlight=False, soft_wrap=True)
        await _cancel(stage)
    elif state.batch["status"] != "completed":
        console.print(unfinished(state.batch, state.elapsed_s), highlight=False, soft_wrap=True)
        return 1
    results = b""
    for file_id in (state.batch["output_file_id"], state.batch["error_file_id"]):
        if file_id is not None:
            results += (await stage.http.get(f"/v1/files/{file_id}/content")).content
    results_path = args.dir / "results.jsonl"
    results_path.write_bytes(results)
    together_s = both[1].elapsed_s - both[0].elapsed_s
    was_taught, answers = args.model == EMBEDDED_MODEL, answers_of(results)
    console.print(f"batch: {len(answers)} of {len(examples)} lines answered in {together_s:.1f} s")
    console.print(f"chat:  {sum(r.error is None for _, r in state.chats)} of {len(state.chats)} answered")
    right = right_answers(examples, answers)
    if was_taught:
        chat_right = sum(skills.is_correct(example, record.text) for example, record in state.chats)
        console.print(
            f"       exactly right: {right} of {len(answers)} lines, {chat_right} of {len(state.chats)} chats"
        )
    met = {beside: _print_chats(state, console, beside_batch=beside) for beside in (False, True)}
    measured = DemoFigures(
        together_s, both[1].offline_tokens - both[0].offline_tokens, state.batch_alone_per_s, *met[False], *met[True]
    )
    formed_right = not was_taught or await _print_formed(stage.http, console)
    console.print(f"results: {results_path}")
    console.print(sentence(measured), highlight=False, soft_wrap=True)
    if was_taught and right < LEAST_RIGHT * len(answers):
        console.print(f"the result is wrong: fewer than {LEAST_RIGHT:.0%} of the batch's answers are right")
        return 1
    return 0 if formed_right else 1


async def _cancel(stage: _Stage) -> None:
    """Cancels the batch and waits until the results of its finished lines are there."""
    await stage.http.post(f"/v1/batches/{stage.state.batch['id']}/cancel")
    until_s = time.monotonic() + max(PATIENCE_S, 2 * stage.state.load.answer_s)
    while stage.state.batch["status"] not in TERMINAL and time.monotonic() < until_s:
        await asyncio.sleep(TICK_S / 2)
        stage.state.batch = await get_batch(stage.http, stage.state.batch["id"])


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
    met = sum(r.met(state.load.ttft_slo_ms / 1e3, state.load.tpot_slo_ms / 1e3) for r in records)
    ttft, tpot = percentiles([r.ttft_s for r in records]), percentiles([r.tpot_s for r in records])
    console.print(
        f"       {'with the batch' if beside_batch else 'alone'}: {met} of {len(records)} within both targets; "
        f"TTFT p50/p99 {ttft.p50 * 1e3:.0f}/{ttft.p99 * 1e3:.0f} ms, "
        f"TPOT {tpot.p50 * 1e3:.0f}/{tpot.p99 * 1e3:.0f} ms",
        highlight=False,
        soft_wrap=True,
    )
    return met, len(records)

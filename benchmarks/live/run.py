"""One run: a server, a batch file, online requests, and the measurements between two scrapes."""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import Reference, random_prompts, vocab_size
from benchmarks.live.plan import (
    OFFLINE_IN,
    OFFLINE_OUT,
    ONLINE_IN,
    ONLINE_OUT,
    PATIENCE_S,
    PHASES,
    START_TIMEOUT_S,
    Plan,
    Window,
)
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.batches import BatchClientError, submit_batch, wait_until_it_runs
from neaptide.loadgen.client.client import StreamClient, open_loop
from neaptide.loadgen.client.prometheus import Samples
from neaptide.loadgen.client.recorder import ChatRecord

MEASURED = tuple(f"neaptide_{name}" for name in ("step_", "recomputed_", "preemptions_", "requests_waiting"))
"""Prefixes of the metrics that are read while clients wait."""


async def scrape(http: httpx.AsyncClient, only: tuple[str, ...] = ("",)) -> Samples:
    return Samples((await http.get("/metrics")).text, only)


def between(start: Samples, end: Samples, seconds: float, *, saturated: bool = False) -> Window:
    """Rates over ``seconds``, or, for an engine that was never idle, over the time of its steps."""

    def delta(name: str, **labels: str) -> float:
        return end.sum(name, **labels) - start.sum(name, **labels)

    steps = max(delta("neaptide_step_seconds_count", phase="total"), 1.0)
    if saturated:
        # Steps can take seconds, and the window's edges lie inside them, so the engine's own busy time counts.
        seconds = sum(delta("neaptide_step_seconds_sum", phase=p) for p in ("total", "schedule", "commit"))
    # A recomputed token is computed twice but counts once. Only offline work is preempted here.
    recomputed = delta("neaptide_recomputed_tokens_total")
    tokens = {c: delta("neaptide_step_tokens_total", **{"class": c}) for c in ("online", "offline")}
    return Window(
        seconds=seconds,
        online_tokens_per_s=tokens["online"] / seconds,
        offline_tokens_per_s=(tokens["offline"] - recomputed) / seconds,
        steps=steps,
        mean_step_ms=1e3 * delta("neaptide_step_seconds_sum", phase="total") / steps,
        phase_ms={p: 1e3 * delta("neaptide_step_seconds_sum", phase=p) / steps for p in PHASES},
        preemptions=delta("neaptide_preemptions_total"),
        prediction_error=delta("neaptide_step_prediction_error_ratio_sum") / steps,
    )


async def submit_offline(http: httpx.AsyncClient, plan: Plan) -> None:
    """Submits the batch file; returns when its lines run."""
    prompts = random_prompts(plan.offline_lines, OFFLINE_IN, vocab_size(plan.model), seed=1000 + plan.seed)
    lines = []
    for i, prompt in enumerate(prompts):
        body = {"model": "m", "prompt": prompt, "max_tokens": OFFLINE_OUT, "temperature": 0, "ignore_eos": True}
        lines.append(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}))
    batch = await submit_batch(http, "w5.jsonl", "\n".join(lines).encode())
    try:
        await wait_until_it_runs(http, batch)
    except BatchClientError as error:
        raise SystemExit(str(error)) from None


async def run(plan: Plan, flags: list[str], *, online: bool, offline: bool, step_log: Path | None = None) -> Window:
    """Runs one server once. The window's records are those of requests that arrived in it.

    Args:
        step_log: file that the engine writes.
    """
    arrivals = plan.arrivals_s() if online else []
    prompts = random_prompts(len(arrivals), ONLINE_IN, vocab_size(plan.model), seed=plan.seed)
    records: list[ChatRecord] = []
    with tempfile.TemporaryDirectory() as directory:
        flags = [str(plan.model), "--served-model-name", "m", *flags]
        flags += [] if step_log is None else ["--step-log", str(step_log)]
        server = ServerProcess(flags, Path(directory), START_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None)
        async with (
            server,
            httpx.AsyncClient(base_url=server.base_url, timeout=600.0, limits=limits) as http,
            StreamClient.beside(http, "m") as client,
        ):
            if offline:
                await submit_offline(http, plan)
            load = online_load(client, arrivals, prompts, records)
            try:
                window = await measured(http, plan, online=online, offline=offline)
                await give_time([load], patience_s=plan.patience_s)
            finally:
                load.cancel()
    begin, end = plan.window_s
    window.records = [r for r in with_unfinished(records, arrivals) if begin <= r.arrival_s < end]
    window.early = [r for r in records if r.arrival_s < begin]
    return window


def online_load(
    client: StreamClient, arrivals_s: Sequence[float], prompts: Sequence[list[int]], records: list[ChatRecord]
) -> asyncio.Task[None]:
    """Starts sending each prompt when it is due, and collects ended requests in ``records``. The caller cancels the
    task."""
    return asyncio.create_task(
        open_loop(
            arrivals_s,
            lambda i: client.complete(prompts[i], ONLINE_OUT, ignore_eos=True),
            lambda i, record: records.append(record),
        )
    )


async def measured(http: httpx.AsyncClient, plan: Plan, *, online: bool, offline: bool) -> Window:
    """Measures the window; without records."""
    begin, end = plan.window_s
    began_s = asyncio.get_running_loop().time()
    await asyncio.sleep(begin)
    start = await scrape(http, MEASURED)
    await asyncio.sleep(end - begin)
    stop = await scrape(http, MEASURED)
    if offline and stop.sum("neaptide_requests_waiting", **{"class": "offline"}) == 0:
        raise SystemExit("the batch ran out inside the window, so the figures would be wrong")
    window = between(start, stop, end - begin, saturated=not online)
    window.clock_s = began_s + begin, began_s + end
    return window


async def give_time(
    load: Sequence["asyncio.Task[Any]"],
    more: Sequence["asyncio.Task[Any]"] = (),
    *,
    patience_s: float = PATIENCE_S,
) -> None:
    """Waits for tasks in flight for up to ``patience_s``, then cancels the rest, and all of ``more``."""
    ended, pending = await asyncio.wait(load, timeout=patience_s)
    for task in (*pending, *more):
        task.cancel()
    await asyncio.gather(*pending, *more, return_exceptions=True)
    for task in ended:
        task.result()  # raises the client's errors


def with_unfinished(records: Sequence[ChatRecord], arrivals_s: Sequence[float]) -> list[ChatRecord]:
    """The records, with a failed one for every request without a record."""
    ended = {record.arrival_s for record in records}
    return [
        *records,
        *(ChatRecord(0.0, arrival_s=at_s, error="unfinished") for at_s in arrivals_s if at_s not in ended),
    ]


async def check(plan: Plan, more_flags: Sequence[str] = ()) -> int:
    """Compares greedy text of the server with the reference; returns how many tokens were compared."""
    prompts = random_prompts(3, ONLINE_IN, vocab_size(plan.model), seed=77)
    reference = Reference(plan.model)
    checked = 0
    with tempfile.TemporaryDirectory() as directory:
        flags = [str(plan.model), "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024"]
        flags += more_flags
        async with ServerProcess(flags, Path(directory), START_TIMEOUT_S) as server:
            async with httpx.AsyncClient(base_url=server.base_url, timeout=600.0) as http:
                for prompt in prompts:
                    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0}
                    body |= {"ignore_eos": True, "return_token_ids": True}
                    choice = (await http.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]
                    checked += reference.agreement(prompt, choice["token_ids"])
    return checked

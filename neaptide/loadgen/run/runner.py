"""Sends a load to one server and records every request."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from neaptide.loadgen.client.batches import TERMINAL, submit_batch, wait_until_it_runs
from neaptide.loadgen.client.client import StreamClient, closed_loop, open_loop
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.client.wording import Counting, Wording
from neaptide.loadgen.run.load import Shot
from neaptide.loadgen.run.samples import Watch

T = TypeVar("T")
SHOW_PERIOD_S = 0.5
TIMEOUT_S = 600.0


@dataclass(slots=True, frozen=True)
class Users:
    """A closed loop of users; each waits for its answer and pauses before the next request."""

    count: int
    think_s: float = 0.0


@dataclass(slots=True, frozen=True, kw_only=True)
class How:
    """How a load is sent."""

    is_chat: bool = True
    model: str | None = None
    """None takes the first model that the server lists."""
    users: Users | None = None
    """None is an open loop: requests are sent at their times, independently of the others."""
    ignores_end: bool = True
    """Asks for answers of exactly the recorded lengths (``ignore_eos``), as vLLM, SGLang and Neaptide support."""
    sends_targets: bool = False
    """Sends the targets as ``ttft_slo_ms`` and ``tpot_slo_ms``."""
    fields: dict[str, Any] = field(default_factory=dict)
    """More fields for every request's body."""
    batch: tuple[str, bytes] | None = None
    """Name and content of a batch file that runs along with the load."""
    keeps_batch: bool = False
    """Lets the batch continue after the run; otherwise it is cancelled."""


@dataclass(slots=True)
class Progress:
    """The state of a run."""

    shots: Sequence[Shot]
    watch: Watch
    wording: Wording
    records: list[tuple[Shot, ChatRecord]] = field(default_factory=list)
    """In the order of their end."""
    num_sent: int = 0
    elapsed_s: float = 0.0
    was_stopped: bool = False
    """The run was stopped before its last request had ended."""


OnProgress = Callable[[Progress], None]


class RunError(Exception):
    """The server cannot be tested. The message is one line with the reason."""


class StoppedError(Exception):
    """The run was stopped before it had begun."""


async def run(
    http: httpx.AsyncClient,
    shots: Sequence[Shot],
    how: How,
    on_progress: OnProgress,
    stop: asyncio.Event | None = None,
) -> Progress:
    """Executes one run.

    When ``stop`` is set, requests in flight are cancelled; what has ended by then is returned.

    Raises:
        RunError: it cannot begin.
        StoppedError: it was stopped first.
    """
    watch, stop = Watch(http), stop or asyncio.Event()
    try:
        begun = await _unless(stop, _begin(http, how, watch))
        if begun is None:
            raise StoppedError
        model, wording = begun
        progress = Progress(shots, watch, wording)
        async with StreamClient.beside(http, model) as client:
            await _send_all(client, progress, how, on_progress, stop)
    finally:
        await _end_batch(watch, how)
    return progress


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work; None where ``stop`` is set first, which cancels the work."""
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)


async def _begin(http: httpx.AsyncClient, how: How, watch: Watch) -> tuple[str, Wording]:
    """Finds the model and the prompts' words, and submits the batch, which ``watch`` gets at once."""
    try:
        model = how.model or await _first_model(http)
        wording = await Counting(http, model, how.is_chat).wording()
        if how.batch is not None:
            watch.batch = await submit_batch(http, *how.batch)
            watch.batch = await wait_until_it_runs(http, watch.batch)
    except httpx.HTTPStatusError as error:
        text = error.response.text[:200] if error.response.is_closed else ""
        if how.is_chat and "no chat template" in text:
            text += "; use --endpoint completions, which needs none"
        raise RunError(f"{http.base_url}: {error.response.status_code} to {error.request.url.path}: {text}") from error
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        advice = "; start a server with: neaptide serve" if isinstance(error, httpx.ConnectError) else ""
        raise RunError(f"{http.base_url}: {type(error).__name__}: {error}{advice}") from error
    return model, wording


async def _first_model(http: httpx.AsyncClient) -> str:
    return str((await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"])


async def _send_all(
    client: StreamClient, progress: Progress, how: How, on_progress: OnProgress, stop: asyncio.Event
) -> None:
    shots = progress.shots
    # Prompts are made before the first request is due, so that making one does not delay another.
    prompts = [progress.wording.text(shot.request.segments) for shot in shots]

    async def send(index: int) -> ChatRecord:
        shot = shots[index]
        progress.num_sent += 1
        arguments = _fields(shot, how) | {"cancel_after_s": shot.cancel_after_s}
        if how.is_chat:
            message = {"role": "user", "content": prompts[index]}
            return await client.chat([message], shot.request.output_tokens, **arguments)
        return await client.complete(prompts[index], shot.request.output_tokens, **arguments)

    def note(index: int, record: ChatRecord) -> None:
        progress.records.append((shots[index], record))

    if how.users is None:
        sending = open_loop([shot.request.arrival_s for shot in shots], send, note)
    else:
        sending = closed_loop(len(shots), how.users.count, how.users.think_s, send, note)
    await progress.watch.look()  # before the first request is due, because first calls take longest
    following = asyncio.create_task(progress.watch.follow())
    showing = asyncio.create_task(_show(progress, on_progress))
    try:
        await _unless(stop, sending)
        progress.was_stopped = len(progress.records) < len(shots)
    finally:
        for task in (following, showing):
            task.cancel()
        await asyncio.gather(following, showing, return_exceptions=True)
    await progress.watch.look()
    on_progress(progress)


async def _show(progress: Progress, on_progress: OnProgress) -> None:
    now = asyncio.get_running_loop().time
    start_s = now()
    while True:
        progress.elapsed_s = now() - start_s
        on_progress(progress)
        await asyncio.sleep(SHOW_PERIOD_S)


async def _end_batch(watch: Watch, how: How) -> None:
    """Cancels the batch however the run ended: otherwise it would disturb the next run."""
    try:
        if watch.batch is not None and watch.batch["status"] not in TERMINAL and not how.keeps_batch:
            await watch.http.post(f"/v1/batches/{watch.batch['id']}/cancel")
    except httpx.HTTPError:
        watch.failures += 1


def _fields(shot: Shot, how: How) -> dict[str, Any]:
    fields = dict(how.fields)
    if how.ignores_end:
        fields["ignore_eos"] = True
    if how.sends_targets:
        fields |= {"ttft_slo_ms": 1e3 * shot.target.ttft_s, "tpot_slo_ms": 1e3 * shot.target.tpot_s}
    return fields

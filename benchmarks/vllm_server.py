"""vLLM's own server, and ours over its workers, in equal conditions: same model, machine, threads, preloaded
libraries."""

import asyncio
import contextlib
import ctypes.util
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import random_prompts, vocab_size
from benchmarks.live.plan import OFFLINE_IN, OFFLINE_OUT, ONLINE_IN, ONLINE_OUT, START_TIMEOUT_S, Plan, Window
from benchmarks.live.run import give_time, scrape, with_unfinished
from benchmarks.other_server import server_process
from neaptide.commands.server_process import free_port
from neaptide.loadgen.client.client import StreamClient, open_loop
from neaptide.loadgen.client.recorder import ChatRecord

ONLINE_PRIORITY, OFFLINE_PRIORITY = 0, 10
CPU_KV_GIB = 4.0
MAX_MODEL_LEN = 1024
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
OPEN = ("vllm:num_requests_running", "vllm:num_requests_waiting")
LOOK_S = 0.2


@dataclass(slots=True, frozen=True)
class Rival:
    """One configuration of vLLM's own server."""

    name: str
    flags: tuple[str, ...]

    @property
    def knows_priorities(self) -> bool:
        return "fcfs" not in self.flags


PRIORITY = ("--scheduling-policy", "priority")
FCFS = Rival("vllm fcfs", ("--scheduling-policy", "fcfs"))
PRIORITY_RIVALS = (
    Rival("vllm priority", PRIORITY),
    Rival("vllm priority, 16 seats", (*PRIORITY, "--max-num-seqs", "16")),
    Rival("vllm priority, 32 seats", (*PRIORITY, "--max-num-seqs", "32")),
)


@dataclass(slots=True, frozen=True)
class Machine:
    """Settings that both engines share."""

    python: Path
    threads: int
    dtype: str
    block_size: int
    kv_gib: float | None
    """None: vLLM's default, which on a CPU is not the same for both."""
    is_eager: bool
    device: str
    max_model_len: int

    @property
    def environment(self) -> Mapping[str, str]:
        """The libraries that vLLM's notes on CPUs recommend, if installed, and the same number of threads for both."""
        if self.device != "cpu":
            return {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        omp, tcmalloc = self.python.parent.parent / "lib" / "libiomp5.so", ctypes.util.find_library("tcmalloc_minimal")
        preloaded = ([str(omp)] if omp.exists() else []) + ([tcmalloc] if tcmalloc else [])
        return {
            "LD_PRELOAD": ":".join(preloaded),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.threads - 1}",
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    @property
    def our_flags(self) -> list[str]:
        flags = ["--executor", "vllm", "--engine-python", str(self.python), "--num-threads", str(self.threads)]
        flags += ["--executor-arg", "enforce_eager=true"] if self.is_eager else []
        flags += ["--device", self.device, "--block-size", str(self.block_size)]
        return flags if self.kv_gib is None else [*flags, "--kv-cache-gib", str(self.kv_gib)]

    @property
    def vllm_flags(self) -> list[str]:
        flags = ["--dtype", self.dtype, "--max-model-len", str(self.max_model_len)]
        flags += ["--enforce-eager"] if self.is_eager else []
        flags += ["--block-size", str(self.block_size)]
        return flags if self.kv_gib is None else [*flags, "--kv-cache-memory-bytes", str(int(self.kv_gib * 2**30))]


@contextlib.asynccontextmanager
async def vllm_server(machine: Machine, model: Path, rival: Rival, log: Path) -> AsyncIterator[str]:
    """Runs vLLM's own server on a free loopback port; yields its address."""
    port = free_port()
    command = [str(machine.python.parent / "vllm"), "serve", str(model), "--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), *machine.vllm_flags, *rival.flags]
    # Plug-ins are given by name: an installed one of ours would else run in every contender.
    environment = os.environ | machine.environment | {"VLLM_PLUGINS": ""}
    async with server_process(command, port, environment, log, START_TIMEOUT_S) as address:
        yield address


@dataclass(slots=True, frozen=True)
class Reading:
    """Tokens that a vLLM server had counted by a moment: prompts with their first token, and outputs."""

    at_s: float
    """On the clock of the chats' records."""
    num_tokens: float


async def read(http: httpx.AsyncClient) -> Reading:
    """Reads the server's counters. A busy server may answer seconds later, so the answer's time counts."""
    page = await scrape(http, COUNTERS)
    return Reading(asyncio.get_running_loop().time(), sum(page.sum(name) for name in COUNTERS))


def window_between(start: Reading, stop: Reading, chats: Sequence[ChatRecord]) -> Window:
    """Rates between two readings; without records. vLLM does not count by class: what is no chat's is offline.

    Args:
        chats: all chats of the run, for one that arrives before the window may have its tokens in it.
    """
    seconds = stop.at_s - start.at_s
    online = sum(tokens_between(chat, start.at_s, stop.at_s) for chat in chats)
    offline = stop.num_tokens - start.num_tokens - online
    return Window(seconds, online / seconds, offline / seconds, clock_s=(start.at_s, stop.at_s))


def tokens_between(chat: ChatRecord, from_s: float, to_s: float) -> float:
    """Tokens of a chat that vLLM counts between two moments. A piece of the stream may have several."""
    if not chat.token_times_s:
        return 0.0
    num_pieces = sum(from_s < at_s <= to_s for at_s in chat.token_times_s)
    tokens_a_piece = max(chat.num_output_tokens / len(chat.token_times_s), 1.0)
    has_prompt = from_s < chat.token_times_s[0] <= to_s
    return num_pieces * tokens_a_piece + (ONLINE_IN if has_prompt else 0)


async def run_rival(
    plan: Plan,
    machine: Machine,
    rival: Rival,
    *,
    offline: bool,
    log: Path | None = None,
    prompts: Sequence[list[int]] | None = None,
) -> Window:
    """Runs one server once, as ``live.run.run`` does for ours: chats begin when the server has all offline lines.

    Args:
        log: where the server's log is kept; None throws it away.
        prompts: of the chats, ``ONLINE_IN`` tokens on average; None draws them, all of that length.

    Raises:
        SystemExit: the server refused requests, or the offline lines ran out.
    """
    arrivals = plan.arrivals_s()
    if prompts is None:
        prompts = random_prompts(len(arrivals), ONLINE_IN, vocab_size(plan.model), seed=plan.seed)
    records: list[ChatRecord] = []
    by_priority = rival.knows_priorities
    with tempfile.TemporaryDirectory() as directory:
        limits = httpx.Limits(max_connections=None)
        async with (
            vllm_server(machine, plan.model, rival, log or Path(directory) / "vllm.log") as address,
            httpx.AsyncClient(base_url=address, timeout=3600.0, limits=limits) as http,
            StreamClient.beside(http, "m") as client,
        ):
            online = {"ignore_eos": True} | ({"priority": ONLINE_PRIORITY} if by_priority else {})
            flood = [asyncio.create_task(line) for line in _lines(http, plan, by_priority)] if offline else []
            tasks = list(flood)
            try:
                await has_all(http, flood)
                load = asyncio.create_task(
                    open_loop(
                        arrivals,
                        lambda i: client.complete(prompts[i], ONLINE_OUT, **online),
                        lambda i, record: records.append(record),
                    )
                )
                tasks.append(load)
                begin, end = plan.window_s
                await asyncio.sleep(begin)
                start = await read(http)
                await asyncio.sleep(end - begin)
                stop = await read(http)
                if offline and all(line.done() for line in flood):
                    raise SystemExit("the offline lines ran out inside the window, so the figures would be wrong")
                check_answers(flood)
                await give_time([load], flood, patience_s=plan.patience_s)
            finally:
                for task in tasks:
                    task.cancel()
    if refusals := [record.error for record in records if (record.error or "").startswith("HTTP ")]:
        raise SystemExit(f"{rival.name} refused {len(refusals)} of {len(arrivals)} chats: {refusals[0]}")
    window = window_between(start, stop, records)
    if not offline:
        window.offline_tokens_per_s = 0.0
    window.records = [record for record in with_unfinished(records, arrivals) if begin <= record.arrival_s < end]
    return window


async def has_all(http: httpx.AsyncClient, flood: "Sequence[asyncio.Task[httpx.Response]]") -> None:
    """Waits until the server runs, keeps or has answered every offline line.

    Raises:
        SystemExit: it refused one.
    """
    while not all(line.done() for line in flood):
        page = await scrape(http, OPEN)
        if sum(page.sum(name) for name in OPEN) + sum(line.done() for line in flood) >= len(flood):
            break
        await asyncio.sleep(LOOK_S)
    check_answers(flood)


def check_answers(flood: "Sequence[asyncio.Task[httpx.Response]]") -> None:
    """Raises SystemExit if the server refused an offline line, and httpx's error if it did not answer one."""
    for line in flood:
        if line.done() and (reply := line.result()).status_code != 200:
            raise SystemExit(f"an offline line was refused with status {reply.status_code}: {reply.text[:200]}")


def _lines(http: httpx.AsyncClient, plan: Plan, by_priority: bool) -> list[Any]:
    """The offline lines, each as one request."""
    body = {"model": "m", "max_tokens": OFFLINE_OUT, "temperature": 0, "ignore_eos": True}
    body |= {"priority": OFFLINE_PRIORITY} if by_priority else {}
    prompts = random_prompts(plan.offline_lines, OFFLINE_IN, vocab_size(plan.model), seed=1000 + plan.seed)
    return [http.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts]

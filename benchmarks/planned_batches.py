"""A batch of few-shot prompts through the real server: what is saved against what was planned, and what the order is
worth.

Lines of MMLU (five shots a subject) and GSM8K (eight shots), shuffled, greedy, of the 111M model or another. The KV
memory is small, so that a cache cannot hold all heads at once. The same file runs under ``neaptide``, whose pool goes
group by group, and under ``fcfs``, in its own order, with the prefix cache of each. With ``--vllm`` both run over
vLLM's workers, and vLLM's own server gets the same lines, all at once, with its own prefix cache.

    python -m benchmarks.planned_batches [--lines 500] [--kv-gib 0.5] [--model DIR] [--quick]
    python -m benchmarks.planned_batches --vllm .vllm/bin/python [--block-size 32] ...

``--quick`` takes 60 lines. Tells of each run on standard error as it ends, then prints a table and one JSON line. Exit
status 1 where the saving is not within a point of the planned one, or an answer is not the reference's up to its first
close call.
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import Reference, model_111m, print_table
from benchmarks.live.plan import LAX_S, START_TIMEOUT_S
from benchmarks.vllm_server import Machine, Rival, vllm_server
from neaptide.commands.server_process import ServerProcess
from neaptide.engine.offline.planning.order import PromptOrder
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.prefix_tree import whole_units
from neaptide.engine.offline.token_file import TokenFile, TokenFileWriter
from neaptide.loadgen.client.batches import TERMINAL, get_batch, submit_batch, wait_until_it_runs
from neaptide.loadgen.workloads.text_sets import gsm8k_prompts, mmlu_prompts

MMLU_OUT, GSM8K_OUT = 4, 32
QUICK_LINES = 60
MAX_MODEL_LEN = 4096
POLL_S = 0.1
BLOCK_TOKENS, VLLM_BLOCK_TOKENS = 16, 32
"""The smallest that each executor has on a CPU."""
WITHIN = 0.01
"""Of all prompt tokens: so near to the planned saving must the measured one be."""
PLANNED, UNORDERED, VLLM = "neaptide", "fcfs", "vllm"
_Row = TypeVar("_Row")


@dataclass(slots=True, frozen=True)
class Line:
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True, frozen=True)
class Outcome:
    seconds: float
    """From the end of the file's check to the batch's."""
    saving: float
    """Cached prompt tokens, of all."""
    answers: list[list[int]]
    """Token ids, by line."""


def lines_of(model: Path, count: int, seed: int = 0) -> list[Line]:
    """Half of each set, from all over it, shuffled."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [(prompt, MMLU_OUT) for prompt in _spread(mmlu_prompts(), count - count // 2)]
    texts += [(prompt, GSM8K_OUT) for prompt, _ in _spread(gsm8k_prompts(), count // 2)]
    random.Random(seed).shuffle(texts)
    lines = [Line(tokenizer.encode(text).ids, out) for text, out in texts]
    return [line for line in lines if len(line.prompt) + line.max_tokens <= MAX_MODEL_LEN]


def _spread(rows: Sequence[_Row], count: int) -> list[_Row]:
    return [rows[k * len(rows) // count] for k in range(count)]


def planned_saving(lines: Sequence[Line], block_size: int) -> float:
    """Of all prompt tokens, what need not be computed if every prefix is computed once, in whole blocks."""
    with tempfile.TemporaryDirectory() as directory:
        with TokenFileWriter(Path(directory, "job")) as writer:
            for line in lines:
                writer.append(line.prompt)
        prompts = Prompts([TokenFile(Path(directory, "job"))])
        shared = whole_units(PromptOrder.of(prompts).shared_tokens, block_size)
    return float(shared.sum() / prompts.lengths.sum())


async def run_batch(flags: Sequence[str], lines: Sequence[Line]) -> Outcome:
    """One server, one batch."""
    content = "\n".join(json.dumps(_batch_line(number, line)) for number, line in enumerate(lines)).encode()
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(list(flags), Path(directory), START_TIMEOUT_S)
        async with server, httpx.AsyncClient(base_url=server.base_url, timeout=600.0) as http:
            batch = await wait_until_it_runs(http, await submit_batch(http, "few_shot.jsonl", content))
            now = asyncio.get_running_loop().time
            began_s = now()
            while batch["status"] not in TERMINAL:
                await asyncio.sleep(POLL_S)
                batch = await get_batch(http, batch["id"])
            seconds = now() - began_s
            if batch["status"] != "completed" or batch["request_counts"]["failed"]:
                raise SystemExit(f"the batch ended as {batch['status']}: {batch['request_counts']}")
            text = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).raise_for_status().text
    bodies: dict[int, dict[str, Any]] = {}
    for row in map(json.loads, text.splitlines()):
        bodies[int(row["custom_id"])] = row["response"]["body"]
    return outcome(seconds, [bodies[number] for number in range(len(lines))])


def _batch_line(number: int, line: Line) -> dict[str, Any]:
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": _body(line)}


def _body(line: Line) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "prompt": line.prompt, "max_tokens": line.max_tokens, "temperature": 0}
    return body | {"ignore_eos": True, "return_token_ids": True}


def outcome(seconds: float, bodies: Sequence[dict[str, Any]]) -> Outcome:
    """Of the replies in the order of the lines."""
    prompt_tokens = sum(body["usage"]["prompt_tokens"] for body in bodies)
    details = [body["usage"].get("prompt_tokens_details") or {} for body in bodies]
    cached_tokens = sum(one.get("cached_tokens") or 0 for one in details)
    answers = [body["choices"][0]["token_ids"] for body in bodies]
    return Outcome(seconds, cached_tokens / prompt_tokens, answers)


async def run_vllm(model: Path, machine: Machine, lines: Sequence[Line]) -> Outcome:
    """vLLM's own server; it has no batch files, so all lines are sent at once."""
    async with AsyncExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "vllm.log"
        rival = Rival(VLLM, ("--enable-prefix-caching", "--enable-prompt-tokens-details"))
        url = await stack.enter_async_context(vllm_server(machine, model, rival, log))
        limits = httpx.Limits(max_connections=None)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=3600.0, limits=limits))
        began_s = asyncio.get_running_loop().time()
        replies = await asyncio.gather(*(http.post("/v1/completions", json=_body(line)) for line in lines))
        seconds = asyncio.get_running_loop().time() - began_s
    return outcome(seconds, [reply.raise_for_status().json() for reply in replies])


def check_answers(model: Path, lines: Sequence[Line], runs: Sequence[Outcome]) -> int:
    """How many lines have different answers. Of those each must be the reference's up to its first close call.

    Raises SystemExit where one is not.
    """
    differing = [n for n in range(len(lines)) if any(a.answers[n] != b.answers[n] for a, b in itertools.pairwise(runs))]
    if differing:
        reference = Reference(model)
        for number, run in itertools.product(differing, runs):
            reference.agreement(lines[number].prompt, run.answers[number])
    return len(differing)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = args.model or model_111m()
    lines = lines_of(model, QUICK_LINES if args.quick else args.lines)
    block_size = args.block_size or (BLOCK_TOKENS if args.vllm is None else VLLM_BLOCK_TOKENS)
    flags = [str(model), "--served-model-name", "m", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
    flags += ["--ttft-slo-ms", str(1e3 * LAX_S), "--tpot-slo-ms", str(1e3 * LAX_S)]
    machine = None
    if args.vllm is None:
        flags += ["--block-size", str(block_size), "--kv-cache-gib", str(args.kv_gib)]
        flags += ["--num-threads", str(args.threads)]
    else:
        machine = Machine(args.vllm, args.threads, "float32", block_size, args.kv_gib, True, "cpu", MAX_MODEL_LEN)
        flags += machine.our_flags
    planned = planned_saving(lines, block_size)
    runs: dict[str, Outcome] = {}
    for policy in (PLANNED, UNORDERED):
        runs[policy] = _told(policy, await run_batch([*flags, "--policy", policy], lines))
    num_differing = check_answers(model, lines, list(runs.values()))
    if machine is not None:
        runs[VLLM] = _told(VLLM, await run_vllm(model, machine, lines))
    return {
        "executor": "torch" if machine is None else "vllm",
        "lines": len(lines),
        "prompt_tokens": int(np.sum([len(line.prompt) for line in lines])),
        "kv_gib": args.kv_gib,
        "block_size": block_size,
        "planned_saving": planned,
        "runs": {name: {"seconds": run.seconds, "saving": run.saving} for name, run in runs.items()},
        "wall_time_ratios": {
            name: run.seconds / runs[PLANNED].seconds for name, run in runs.items() if name != PLANNED
        },
        "lines_with_other_answers": num_differing,
        "holds": abs(runs[PLANNED].saving - planned) <= WITHIN,
    }


def _told(name: str, run: Outcome) -> Outcome:
    """A run takes minutes: what ended counts even if a later one fails."""
    print(f"{name}: {run.seconds:.1f} s, {run.saving:.2%} of the prompt tokens saved", file=sys.stderr, flush=True)
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LINES} lines")
    parser.add_argument("--model", type=Path, help="directory; without it the 111M model")
    parser.add_argument("--kv-gib", type=float, default=0.5)
    parser.add_argument("--block-size", type=int, help=f"tokens; {BLOCK_TOKENS}, over vLLM {VLLM_BLOCK_TOKENS}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter with vLLM: run over its workers")
    result = asyncio.run(measure(parser.parse_args()))
    rows = [[name, run["seconds"], f"{run['saving']:.2%}"] for name, run in result["runs"].items()]
    title = f"{result['lines']} lines, planned saving {result['planned_saving']:.2%}"
    print_table(title, ["run", "seconds", "prompt tokens saved"], rows)
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

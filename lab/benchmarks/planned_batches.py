"""A batch of few-shot prompts through the real server: what is saved against what was planned, and what the order is
worth.

Lines of MMLU (five shots a subject) and GSM8K (eight shots), shuffled, greedy, of the 111M model or another. The KV
memory is small, so that a cache cannot hold all heads at once. The same file runs under ``neaptide``, whose pool goes
group by group, and under ``fcfs``, in its own order, with the prefix cache of each. With ``--vllm`` both run over
vLLM's workers, and vLLM's own server gets the same lines, all at once, with its own prefix cache; with ``--both`` on
the torch executor first.

    python -m lab.benchmarks.planned_batches [--lines 500] [--kv-gib 0.5] [--model DIR] [--dtype bfloat16] [--quick]
    python -m lab.benchmarks.planned_batches --vllm .vllm/bin/python [--both] [--limit-min 8] [--block-size 32] ...

``--quick`` takes 60 lines. Tells of each run on standard error as it ends, then prints a table and one JSON line. Exit
status 1 where an executor's saving is not within a point of the planned one, where it has no unordered run to compare
with, or where an answer is not the reference's up to its first close call. ``--limit-min`` begins to count when the
lines are there; what has not ended by then is missing from the table.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import torch
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
"""Largest difference of measured and planned saving, as a fraction of all prompt tokens."""
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


def lines_of(model: Path, count: int, max_model_len: int = MAX_MODEL_LEN, seed: int = 0) -> list[Line]:
    """Half of each set, from all over it, shuffled, but for what is longer than the context."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [(prompt, MMLU_OUT) for prompt in _spread(mmlu_prompts(), count - count // 2)]
    texts += [(prompt, GSM8K_OUT) for prompt, _ in _spread(gsm8k_prompts(), count // 2)]
    random.Random(seed).shuffle(texts)
    lines = [Line(tokenizer.encode(text).ids, out) for text, out in texts]
    return [line for line in lines if len(line.prompt) + line.max_tokens <= max_model_len]


def _spread(rows: Sequence[_Row], count: int) -> list[_Row]:
    return [rows[k * len(rows) // count] for k in range(count)]


def planned_saving(lines: Sequence[Line], block_size: int) -> float:
    """Fraction of all prompt tokens that need not be computed if every prefix is computed once, in whole blocks."""
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
    """Outcome of the replies, which are in the order of the lines."""
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


@dataclass(slots=True)
class Differences:
    """Differences between the answers of several runs to the same lines."""

    partings: dict[int, int] = field(default_factory=dict)
    """By line, the first token that is not the same in all."""
    checked: int = 0
    """Lines with different answers that were held against the reference."""
    wrong: list[int] = field(default_factory=list)
    """Those of them that no close call excuses."""


def check_answers(
    reference: Reference, lines: Sequence[Line], runs: Sequence[Outcome], most: int | None = None
) -> Differences:
    """Holds lines with different answers, ``most`` of them at most, against the reference.

    Where two answers part, the reference must have had a close call by then, and up to its first one they must be the
    reference's.
    """
    found = Differences()
    for number in range(len(lines)):
        answers = [run.answers[number] for run in runs]
        parting = next((k for k, tokens in enumerate(zip(*answers, strict=True)) if len({*tokens}) > 1), None)
        if parting is not None:
            found.partings[number] = parting
    drawn = sorted(found.partings)
    if most is not None and most < len(drawn):
        drawn = sorted(random.Random(0).sample(drawn, most))
    for number in drawn:
        tokens = runs[0].answers[number][: found.partings[number] + 1]
        try:
            is_close = reference.agreement(lines[number].prompt, tokens) < len(tokens)
        except SystemExit:
            is_close = False
        found.checked += 1
        if not is_close:
            found.wrong.append(number)
    return found


@dataclass(slots=True, frozen=True)
class Setting:
    """What runs on one executor."""

    executor: str
    lines: Sequence[Line]
    block_size: int
    model: Path
    flags: Sequence[str]
    """Flags of our server."""
    machine: Machine | None
    """vLLM's own server, which is also measured."""

    async def run(self, name: str) -> Outcome:
        if name == VLLM:
            assert self.machine is not None
            found = await run_vllm(self.model, self.machine, self.lines)
        else:
            found = await run_batch([*self.flags, "--policy", name], self.lines)
        # A run takes minutes: what ended counts even if a later one fails.
        told = f"{self.executor}, {name}: {found.seconds:.1f} s, {found.saving:.2%} of the prompt tokens saved"
        print(told, file=sys.stderr, flush=True)
        return found


def settings_of(args: argparse.Namespace, model: Path, lines: Sequence[Line]) -> list[Setting]:
    flags = [str(model), "--served-model-name", "m", "--dtype", args.dtype]
    flags += ["--max-model-len", str(args.max_model_len)]
    flags += ["--ttft-slo-ms", str(1e3 * LAX_S), "--tpot-slo-ms", str(1e3 * LAX_S)]
    found = []
    if args.vllm is None or args.both:
        size = args.block_size or BLOCK_TOKENS
        more = ["--block-size", str(size), "--kv-cache-gib", str(args.kv_gib), "--num-threads", str(args.threads)]
        found.append(Setting("torch", lines, size, model, [*flags, *more], None))
    if args.vllm is not None:
        size = args.block_size or VLLM_BLOCK_TOKENS
        machine = Machine(args.vllm, args.threads, args.dtype, size, args.kv_gib, True, "cpu", args.max_model_len)
        found.append(Setting("vllm", lines, size, model, [*flags, *machine.our_flags], machine))
    return found


Runs = dict[str, Outcome]
"""By policy, or vLLM's own server."""


async def run_all(settings: Sequence[Setting], limit_s: float | None) -> list[Runs]:
    """By setting; those that are compared with ours before the others. What ends too late is missing."""
    found: list[Runs] = [{} for _ in settings]
    try:
        async with asyncio.timeout(limit_s) as limit:
            for setting, runs in zip(settings, found, strict=True):
                for name in (PLANNED, UNORDERED) if setting.machine is None else (PLANNED, VLLM, UNORDERED):
                    runs[name] = await setting.run(name)
    except TimeoutError:
        if not limit.expired():
            raise
        print("the limit is over: what has not ended is missing", file=sys.stderr, flush=True)
    return found


def finding(setting: Setting, runs: Runs, reference: Reference, most: int | None) -> dict[str, Any]:
    planned = planned_saving(setting.lines, setting.block_size)
    differences = check_answers(reference, setting.lines, list(runs.values()), most)
    ours = runs.get(PLANNED)
    others = {name: run for name, run in runs.items() if name != PLANNED}
    is_near = ours is not None and abs(ours.saving - planned) <= WITHIN
    return {
        "block_size": setting.block_size,
        "planned_saving": planned,
        "runs": {name: {"seconds": run.seconds, "saving": run.saving} for name, run in runs.items()},
        "wall_time_ratios": {} if ours is None else {name: one.seconds / ours.seconds for name, one in others.items()},
        "lines_with_other_answers": len(differences.partings),
        "of_them_checked": differences.checked,
        "wrong_lines": differences.wrong,
        "holds": is_near and bool(others) and not differences.wrong,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = args.model or model_111m()
    lines = lines_of(model, QUICK_LINES if args.quick else args.lines, args.max_model_len)
    settings = settings_of(args, model, lines)
    found = asyncio.run(run_all(settings, None if args.limit_min is None else 60.0 * args.limit_min))
    reference = Reference(model, getattr(torch, args.dtype))
    findings = {
        setting.executor: finding(setting, runs, reference, args.reference_lines)
        for setting, runs in zip(settings, found, strict=True)
    }
    return {
        "lines": len(lines),
        "prompt_tokens": int(np.sum([len(line.prompt) for line in lines])),
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "kv_gib": args.kv_gib,
        "executors": findings,
        "holds": all(one["holds"] for one in findings.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LINES} lines")
    parser.add_argument("--model", type=Path, help="directory; without it the 111M model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN, help="longer lines are left out")
    parser.add_argument("--kv-gib", type=float, default=0.5)
    parser.add_argument("--block-size", type=int, help=f"tokens; {BLOCK_TOKENS}, over vLLM {VLLM_BLOCK_TOKENS}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter with vLLM: run over its workers")
    parser.add_argument("--both", action="store_true", help="with --vllm: on the torch executor as well")
    parser.add_argument("--limit-min", type=float, metavar="M", help="minutes after which no run goes on")
    parser.add_argument("--reference-lines", type=int, metavar="N", help="lines with other answers to check; all")
    result = measure(parser.parse_args())
    for executor, one in result["executors"].items():
        rows = [[name, run["seconds"], f"{run['saving']:.2%}"] for name, run in one["runs"].items()]
        title = f"{executor}, {result['lines']} lines, planned saving {one['planned_saving']:.2%}"
        print_table(title, ["run", "seconds", "prompt tokens saved"], rows)
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

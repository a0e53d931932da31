"""Time to the first token of a chat alone, part by part: the step that computes its prompt, and everything else.

Chats come one after the other, each with one token of answer, so that each has one step. Between two of them the
server's metrics are read, so that every part is that of one chat.

    python -m lab.benchmarks.first_tokens [--prompt-tokens 32 128 512] [--chats 40] [--smoke]

Prints a table of medians, then one JSON line. ``ratio`` is the client's TTFT over the time of the step. ``--smoke``
uses the embedded model for a moment.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import EMBEDDED, machine, model_111m, print_table, random_prompts, vocab_size
from benchmarks.live.run import scrape
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import StreamClient
from neaptide.loadgen.client.prometheus import Samples

LARGEST_RATIO = 1.25
WARM_UP = 5
PHASES = ("schedule", "prepare", "model", "sample", "commit")
PARTS = ("client and sockets", "API process and queue", *PHASES)


def parts_of(ttft_s: float, before: Samples, after: Samples) -> dict[str, float]:
    """Seconds of every part of one chat's first token, of its ``step``, and their sum, ``ttft``.

    Raises:
        ValueError: it had more than one step.
    """

    def delta(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    if (steps := delta("neaptide_step_seconds_count", phase="total")) != 1:
        raise ValueError(f"the chat had {steps:g} steps: its prompt must fit into one")
    phases = {phase: delta("neaptide_step_seconds_sum", phase=phase) for phase in PHASES}
    served_s = delta("neaptide_request_ttft_seconds_sum")
    return {
        "ttft": ttft_s,
        "step": delta("neaptide_step_seconds_sum", phase="total"),
        PARTS[0]: ttft_s - served_s,
        PARTS[1]: served_s - sum(phases.values()),
        **phases,
    }


async def chats_alone(model: Path, flags: list[str], prompt_tokens: int, chats: int) -> dict[str, Any]:
    """Medians in ms of every part."""
    prompts = random_prompts(WARM_UP + chats, prompt_tokens, vocab_size(model), seed=prompt_tokens)
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        served = [str(model), "--served-model-name", "m", *flags]
        async with (
            ServerProcess(served, Path(directory)) as server,
            httpx.AsyncClient(base_url=server.base_url) as http,
            StreamClient.beside(http, "m") as client,
        ):
            before = await scrape(http)
            for number, prompt in enumerate(prompts):
                one = await client.complete(prompt, 1, ignore_eos=True)
                if one.error is not None:
                    raise SystemExit(f"a chat failed: {one.error}")
                after = await scrape(http)
                if number >= WARM_UP and one.ttft_s is not None:  # some tokens have no text
                    found.append(parts_of(one.ttft_s, before, after))
                before = after
    if 2 * len(found) < chats:
        raise SystemExit(f"only {len(found)} of {chats} first tokens have a text")
    medians = {part: 1e3 * statistics.median(each[part] for each in found) for part in found[0]}
    return {"prompt_tokens": prompt_tokens, "ms": medians, "ratio": medians["ttft"] / medians["step"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--smoke", action="store_true", help="the embedded model, three chats of 32 tokens")
    args = parser.parse_args()
    model = EMBEDDED if args.smoke else model_111m()
    if args.smoke:
        args.prompt_tokens, args.chats = [32], 3
    flags = ["--dtype", args.dtype, "--num-threads", str(args.threads), "--ttft-slo-ms", "3600000"]
    runs = [asyncio.run(chats_alone(model, flags, tokens, args.chats)) for tokens in args.prompt_tokens]
    columns = ["prompt", *PARTS, "TTFT", "its step", "ratio"]
    rows = [
        [
            run["prompt_tokens"],
            *(round(run["ms"][part], 2) for part in (*PARTS, "ttft", "step")),
            round(run["ratio"], 3),
        ]
        for run in runs
    ]
    print_table(f"{model.name}, {args.threads} threads: a first token alone, medians in ms", columns, rows)
    is_met = {str(run["prompt_tokens"]): run["ratio"] <= LARGEST_RATIO for run in runs}
    print(json.dumps({"machine": machine(), "model": model.name, "dtype": args.dtype, "is_met": is_met, "runs": runs}))


if __name__ == "__main__":
    main()

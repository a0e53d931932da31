"""Whether accepted quotes are kept beside chats, and whether the chats are in time all the same.

One real server with a steady load of chats, first alone and then beside batches. Some batches are done first, from
which the server learns answers and speed. Every further batch is quoted and created with ``accept_by``, one after the
other, so that its quoted p90 is its deadline. A batch is kept if it is completed by then.

    python -m lab.benchmarks.quotes_kept [--batches 12] [--lines 200] [--rate 2] [--executor sim|torch] [--model DIR]

Prints a table, then one JSON line. Exit status 1 unless nine of ten accepted quotes are kept and the chats' attainment
is within a point of alone.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import EMBEDDED, print_table, random_prompts, vocab_size
from benchmarks.live.plan import START_TIMEOUT_S, Targets
from lab.benchmarks.submission import content_of, repeated_arrivals
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.batches import TERMINAL, get_batch
from neaptide.loadgen.client.client import StreamClient, open_loop
from neaptide.loadgen.client.recorder import ChatRecord, attainment

KEPT_BAR, LOST_BAR = 0.9, 0.01
PROMPT_TOKENS, ANSWER_TOKENS = 64, 16
PERIOD_S, POLL_S, LONGEST_S = 5.0, 0.5, 3600.0
ACCEPT_S = 3600
"""Every batch is accepted if it can be done within this time."""


@dataclass(slots=True, frozen=True)
class PromisedEnd:
    """An accepted batch. Unix times."""

    lines: int
    asked_s: float
    p50_s: float
    """Quoted seconds until its end, in half of the cases."""
    due_at: int
    completed_at: int | None

    @property
    def is_kept(self) -> bool:
        return self.completed_at is not None and self.completed_at <= self.due_at


async def measure(
    args: argparse.Namespace, model: Path, flags: Sequence[str]
) -> tuple[list[PromisedEnd], list[ChatRecord], list[ChatRecord]]:
    """The accepted batches, and the chats that were due alone and beside batches."""
    now, rng = asyncio.get_running_loop().time, random.Random(47)
    arrivals = repeated_arrivals(args.rate, PERIOD_S, LONGEST_S, seed=0)
    prompts = random_prompts(len(arrivals), PROMPT_TOKENS, vocab_size(model), seed=0)
    records: list[ChatRecord] = []
    with tempfile.TemporaryDirectory() as directory:
        flags = [str(model), "--served-model-name", "m", "--shadow", "off", *flags]
        async with (
            ServerProcess(flags, Path(directory), START_TIMEOUT_S) as server,
            httpx.AsyncClient(base_url=server.base_url, timeout=600.0) as http,
            StreamClient.beside(http, "m") as client,
        ):
            for _ in range(args.learned):
                await _batch(http, rng.randint(args.lines // 2, args.lines), None)
            load = asyncio.create_task(
                open_loop(
                    arrivals,
                    lambda i: client.complete(prompts[i], ANSWER_TOKENS, ignore_eos=True),
                    lambda _, record: records.append(record),
                )
            )
            try:
                await asyncio.sleep(PERIOD_S)
                begin_s = now()
                await asyncio.sleep(args.turn_s)
                beside_s = now()
                ends = [
                    await _batch(http, rng.randint(args.lines // 4, args.lines), int(time.time()) + ACCEPT_S)
                    for _ in range(args.batches)
                ]
                end_s = now()
                await asyncio.sleep(PERIOD_S)  # chats that were due end
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
    alone = [one for one in records if begin_s <= one.start_s < beside_s]
    return ends, alone, [one for one in records if beside_s <= one.start_s < end_s]


async def _batch(http: httpx.AsyncClient, num_lines: int, accept_by: int | None) -> PromisedEnd:
    """Creates a batch and waits for its end; with ``accept_by``, after its quote."""
    files = {"file": ("lines.jsonl", content_of(num_lines, seed=num_lines), "application/jsonl")}
    upload = (await http.post("/v1/files", files=files, data={"purpose": "batch"})).raise_for_status().json()
    body: dict[str, Any] = {"input_file_id": upload["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    asked_s, p50_s = time.time(), 0.0
    if accept_by is not None:
        reply = await http.post("/v1/batches/quote", json={"input_file_id": upload["id"]})
        p50_s = reply.raise_for_status().json()["windows"][0]["p50_seconds"] or float("inf")
        body["accept_by"] = accept_by
    batch = (await http.post("/v1/batches", json=body)).raise_for_status().json()
    while batch["status"] not in TERMINAL:
        await asyncio.sleep(POLL_S)
        batch = await get_batch(http, batch["id"])
    due_at = batch["neaptide"]["due_at"] if accept_by is not None else 0
    print(f"{num_lines} lines: {batch['status']} after {time.time() - asked_s:.1f} s", file=sys.stderr, flush=True)
    return PromisedEnd(num_lines, asked_s, p50_s, due_at, batch["completed_at"])


def summary(
    ends: Sequence[PromisedEnd], alone: Sequence[ChatRecord], beside: Sequence[ChatRecord], targets: Targets
) -> dict[str, Any]:
    kept = sum(one.is_kept for one in ends) / len(ends)
    attained = {
        name: attainment(chats, targets.ttft_s, targets.tpot_s)
        for name, chats in (("alone", alone), ("beside", beside))
    }
    lost = attained["alone"] - attained["beside"]
    return {
        "accepted": len(ends),
        "kept": kept,
        "ended_by_p50": sum(
            one.completed_at is not None and one.completed_at - one.asked_s <= one.p50_s for one in ends
        )
        / len(ends),
        "chats": {"alone": len(alone), "beside": len(beside)},
        "attainment": attained,
        "holds": kept >= KEPT_BAR and lost <= LOST_BAR + 1e-9,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="directory; without it the bundled model")
    parser.add_argument("--executor", default="sim", choices=("torch", "sim"))
    parser.add_argument("--batches", type=int, default=12, help="that are accepted")
    parser.add_argument("--learned", type=int, default=3, help="batches before them, without a promise")
    parser.add_argument("--lines", type=int, default=200, help="of the largest batch")
    parser.add_argument("--rate", type=float, default=2.0, help="chats per second")
    parser.add_argument("--turn-s", type=float, default=30.0, help="seconds of chats alone")
    parser.add_argument("--ttft-slo-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-slo-ms", type=float, default=100.0)
    args = parser.parse_args(argv)
    slos = ["--ttft-slo-ms", str(args.ttft_slo_ms), "--tpot-slo-ms", str(args.tpot_slo_ms)]
    ends, alone, beside = asyncio.run(measure(args, args.model, ["--executor", args.executor, *slos]))
    result = summary(ends, alone, beside, Targets(args.ttft_slo_ms / 1e3, args.tpot_slo_ms / 1e3))
    rows = [
        [
            one.lines,
            f"{one.p50_s:.1f}",
            f"{one.due_at - one.asked_s:.1f}",
            "-" if one.completed_at is None else f"{one.completed_at - one.asked_s:.1f}",
            "yes" if one.is_kept else "no",
        ]
        for one in ends
    ]
    print_table("accepted batches", ["lines", "p50, s", "promised, s", "took, s", "kept"], rows)
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())

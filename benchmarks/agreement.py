"""Whether ``neaptide loadgen`` and AIPerf say the same of one server: the same load, by turns.

The load is a trace file that both read (Mooncake's format): Poisson arrivals, 128 tokens in and 32 out, sent when they
are due. One server for all turns, in each of which ours goes first and then AIPerf; prompts are each tool's own, new in
every turn. Medians of TTFT (from the sending to the first chunk with text) and TPOT over the turns must agree within
5%.

By default the server's steps take a fixed 30 ms (``--executor sim``): then a difference is the tools' own. With
``--executor torch`` it computes the embedded model.

    python -m venv .aiperf && .aiperf/bin/python -m pip install aiperf
    python -m benchmarks.agreement --aiperf .aiperf/bin/aiperf

Prints a table, then one JSON line; the exit status is 1 if a median differs by more than 5%.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import EMBEDDED, print_table
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import poisson_arrivals

INPUT_TOKENS, OUTPUT_TOKENS = 128, 32
SIM_STEP_MS = 30.0
MOST_APART = 0.05
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
OURS, THEIRS = "neaptide loadgen", "AIPerf"
AIPERF_NAMES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency"}
"""Its ``inter_token_latency`` is (end - first token) / (tokens - 1): what we call TPOT."""


@dataclass(slots=True, frozen=True)
class Medians:
    """Of one tool in one turn, milliseconds."""

    ttft: float
    """From the sending to the first chunk with text, which is what AIPerf calls TTFT."""
    tpot: float
    requests: int
    late: float = 0.0
    """By which a request was sent after it was due: our own TTFT counts from then, and is longer by as much."""


class ToolError(Exception):
    """A tool did not do its work; the message is the end of what it said."""


def trace_text(rate_rps: float, duration_s: float, seed: int) -> str:
    """Poisson arrivals in Mooncake's format, in whole milliseconds."""
    arrivals_ms = [round(1e3 * at_s) for at_s in poisson_arrivals(rate_rps, duration_s, seed)]
    rows = [{"timestamp": at, "input_length": INPUT_TOKENS, "output_length": OUTPUT_TOKENS} for at in arrivals_ms]
    return "".join(json.dumps(row) + "\n" for row in rows)


def medians_of_ours(result: Mapping[str, Any]) -> Medians:
    (figures,) = result["servers"].values()
    requests = figures["requests"] - figures["failed"]
    ttft, tpot, late = (figures[name]["p50"] for name in ("ttft_from_sending_ms", "tpot_ms", "late_ms"))
    return Medians(ttft, tpot, requests, late)


def medians_of_aiperf(result: Mapping[str, Any]) -> Medians:
    """Raises ToolError for figures in another unit."""
    found = {name: result[theirs] for name, theirs in AIPERF_NAMES.items()}
    if any(figures["unit"] != "ms" for figures in found.values()):
        raise ToolError(f"figures are in {', '.join(figures['unit'] for figures in found.values())}, not in ms")
    ttft, tpot = (float(found[name]["p50"]) for name in ("ttft", "tpot"))
    return Medians(ttft, tpot, round(result["request_count"]["avg"]))


def ratios_of(turns: Sequence[Mapping[str, Medians]]) -> dict[str, float]:
    """Ours over theirs, of the medians over the turns."""

    def median_of(tool: str, what: str) -> float:
        return statistics.median(getattr(turn[tool], what) for turn in turns)

    return {what: round(median_of(OURS, what) / median_of(THEIRS, what), 4) for what in AIPERF_NAMES}


def agree(ratios: Mapping[str, float]) -> bool:
    return all(abs(round(ratio - 1.0, 4)) <= MOST_APART for ratio in ratios.values())


async def call(command: Sequence[str | Path]) -> None:
    """Raises ToolError if it fails."""
    # Told to be offline, AIPerf takes a tokenizer's folder for a name on the hub.
    env = {name: value for name, value in os.environ.items() if name not in OFFLINE}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise ToolError(f"{command[0]} ended with {process.returncode}:\n{said.decode(errors='replace')[-3000:]}")


async def run_ours(url: str, trace: Path, directory: Path, seed: int) -> Medians:
    found = directory / "ours.json"
    command = [sys.executable, "-m", "neaptide", "loadgen", "replay", str(trace), "--server", url]
    await call([*command, "--seed", str(seed), "--json", str(found), "--html", str(directory / "ours.html")])
    return medians_of_ours(json.loads(found.read_text()))


async def run_aiperf(aiperf: Path, url: str, trace: Path, directory: Path, seed: int) -> Medians:
    load = ["--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
    counted = ["--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--random-seed", str(seed)]
    quiet = ["--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1"]
    what = ["-m", EMBEDDED.name, "--tokenizer", str(EMBEDDED), "--endpoint-type", "chat", "--streaming", "-u", url]
    out = directory / "aiperf"
    await call([aiperf, "profile", *what, *load, *counted, *quiet, "--output-artifact-dir", str(out)])
    return medians_of_aiperf(json.loads((out / "profile_export_aiperf.json").read_text()))


async def measure(args: argparse.Namespace) -> list[dict[str, Medians]]:
    flags = ["--executor", args.executor, "--log-level", "warning"]
    if args.executor == "sim":
        flags += ["--sim-step-ms", str(SIM_STEP_MS)]
    turns: list[dict[str, Medians]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with ServerProcess(flags, directory) as server:
            for turn in range(args.turns):
                place = directory / f"turn{turn}"
                place.mkdir()
                trace = place / "trace.jsonl"
                trace.write_text(trace_text(args.rate, args.duration_s, args.seed + turn))
                ours = await run_ours(server.base_url, trace, place, args.seed + turn)
                theirs = await run_aiperf(args.aiperf, server.base_url, trace, place, args.seed + turn)
                turns.append({OURS: ours, THEIRS: theirs})
                print(f"turn {turn + 1}: {ours} {theirs}", flush=True)
    return turns


def show(turns: Sequence[Mapping[str, Medians]], ratios: Mapping[str, float]) -> None:
    rows = []
    for number, turn in enumerate(turns, 1):
        for what in AIPERF_NAMES:
            ours, theirs = (getattr(turn[tool], what) for tool in (OURS, THEIRS))
            rows.append(
                [f"turn {number}, {what.upper()} p50, ms", f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.3f}"]
            )
    rows += [[f"{what.upper()}, medians over the turns", "", "", f"{ratio:.3f}"] for what, ratio in ratios.items()]
    print_table("the same load on one server", ["", OURS, THEIRS, "ours / theirs"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, required=True, metavar="FILE", help="its command")
    parser.add_argument("--executor", choices=("sim", "torch"), default="sim", help="the server's (sim)")
    # A request waits for the rest of a step: TTFTs scatter evenly over 30 ms, and the median of 640 is good to 0.6 ms.
    parser.add_argument("--rate", type=float, default=8.0, help="requests/s (8)")
    parser.add_argument("--duration-s", type=float, default=40.0, help="of a run (40)")
    parser.add_argument("--turns", type=int, default=2, help="(2)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.aiperf = args.aiperf.absolute()
    try:
        turns = asyncio.run(measure(args))
    except (ToolError, OSError) as error:
        parser.exit(2, f"{error}\n")
    ratios = ratios_of(turns)
    show(turns, ratios)
    numbers = [{tool: dataclasses.asdict(one) for tool, one in turn.items()} for turn in turns]
    print(json.dumps({"ratios": ratios, "agree": agree(ratios), "executor": args.executor, "turns": numbers}))
    return 0 if agree(ratios) else 1


if __name__ == "__main__":
    sys.exit(main())

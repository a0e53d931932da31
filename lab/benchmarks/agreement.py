"""Whether ``neaptide loadgen`` and AIPerf say the same of one server: the same load, by turns.

The load is a trace file that both read (Mooncake's format): Poisson arrivals, 128 tokens in and 32 out, sent when they
are due. One server for all turns; ours goes first in the odd ones and AIPerf in the even ones, so that a machine that
becomes faster or slower favours neither. Prompts are each tool's own, new in every turn. Compared are the medians of
TTFT (from the sending to the first chunk with text) and TPOT over all requests of all turns: their ratios must be
within 5%, and come with the interval in which 95% of such ratios lie when the requests are drawn anew. ``is_shown``
says that the whole interval is within 5%.

By default the server's steps take a fixed 30 ms (``--executor sim``): then a difference is the tools' own. With
``--executor torch`` it computes the embedded model.

    python -m venv .aiperf && .aiperf/bin/python -m pip install aiperf
    python -m lab.benchmarks.agreement --aiperf .aiperf/bin/aiperf

Prints a table, then one JSON line; the exit status is 1 if a median differs by more than 5%.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.common import EMBEDDED, print_table
from neaptide.commands.server_process import ServerProcess
from neaptide.loadgen.client.client import poisson_arrivals
from neaptide.loadgen.percentiles import percentile

INPUT_TOKENS, OUTPUT_TOKENS = 128, 32
SIM_STEP_MS = 30.0
MOST_APART = 0.05
DRAWS = 2000
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
OURS, THEIRS = "neaptide loadgen", "AIPerf"
AIPERF_NAMES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency"}
"""Its ``inter_token_latency`` is (end - first token) / (tokens - 1): what we call TPOT."""


@dataclass(slots=True, frozen=True)
class Times:
    """Milliseconds of the answered requests of one tool in one turn."""

    ttft: list[float]
    """From the sending to the first chunk with text, which is what AIPerf calls TTFT."""
    tpot: list[float]
    late: list[float] = field(default_factory=list)
    """By which a request was sent after it was due: our own TTFT counts from then, and is longer by as much."""

    def medians(self) -> dict[str, float]:
        found = {"ttft": self.ttft, "tpot": self.tpot} | ({"late": self.late} if self.late else {})
        return {name: round(percentile(values, 0.5), 3) for name, values in found.items()}


Turn = Mapping[str, Times]
"""By tool."""
FloatArray = npt.NDArray[np.float64]


class Ratio(NamedTuple):
    ratio: float
    low: float
    """Lower end of the 95% bootstrap interval of the ratio."""
    high: float
    """Upper end of the 95% bootstrap interval of the ratio."""


class ToolError(Exception):
    """A tool did not do its work; the message is the end of what it said."""


def trace_text(rate_rps: float, duration_s: float, seed: int) -> str:
    """Poisson arrivals in Mooncake's format, in whole milliseconds."""
    arrivals_ms = [round(1e3 * at_s) for at_s in poisson_arrivals(rate_rps, duration_s, seed)]
    rows = [{"timestamp": at, "input_length": INPUT_TOKENS, "output_length": OUTPUT_TOKENS} for at in arrivals_ms]
    return "".join(json.dumps(row) + "\n" for row in rows)


def times_of_ours(text: str) -> Times:
    """The times in the output of ``--records``."""
    lines = [json.loads(line) for line in text.splitlines()]
    fine = [line for line in lines if line["error"] is None and line["tpot_ms"] is not None]
    return Times(*([line[name] for line in fine] for name in ("ttft_from_sending_ms", "tpot_ms", "late_ms")))


def times_of_aiperf(text: str) -> Times:
    """The times in AIPerf's ``profile_export.jsonl``. Raises ToolError for figures in another unit."""
    times: dict[str, list[float]] = {name: [] for name in AIPERF_NAMES}
    for line in map(json.loads, text.splitlines()):
        found = {name: line["metrics"].get(theirs) for name, theirs in AIPERF_NAMES.items()}
        if line.get("error") is not None or None in found.values():
            continue
        for name, figure in found.items():
            if figure["unit"] != "ms":
                raise ToolError(f"{AIPERF_NAMES[name]} is in {figure['unit']}, not in ms")
            times[name].append(float(figure["value"]))
    return Times(**times)


def ratios_of(turns: Sequence[Turn], seed: int = 0) -> dict[str, Ratio]:
    """Ours over theirs, of the medians over all requests of all turns."""
    rng, found = np.random.default_rng(seed), {}
    for what in AIPERF_NAMES:
        ours, theirs = (np.concatenate([getattr(turn[tool], what) for turn in turns]) for tool in (OURS, THEIRS))
        drawn = [_drawn_medians(values, rng) for values in (ours, theirs)]
        low, high = np.percentile(drawn[0] / drawn[1], (2.5, 97.5)).tolist()
        ratio = float(np.median(ours) / np.median(theirs))
        found[what] = Ratio(round(ratio, 4), round(low, 4), round(high, 4))
    return found


def _drawn_medians(values: FloatArray, rng: np.random.Generator) -> FloatArray:
    """[DRAWS], each of as many of the values, drawn anew with repeats."""
    medians: FloatArray = np.median(rng.choice(values, (DRAWS, len(values))), axis=1)
    return medians


def agree(ratios: Mapping[str, Ratio]) -> bool:
    return all(abs(round(one.ratio - 1.0, 4)) <= MOST_APART for one in ratios.values())


def is_shown(ratios: Mapping[str, Ratio]) -> bool:
    """Not by chance."""
    return all(one.low >= 1.0 - MOST_APART and one.high <= 1.0 + MOST_APART for one in ratios.values())


async def call(command: Sequence[str | Path]) -> None:
    """Raises ToolError if it fails."""
    # In offline mode, AIPerf takes a tokenizer's folder for a name on the hub.
    env = {name: value for name, value in os.environ.items() if name not in OFFLINE}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=env
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise ToolError(f"{command[0]} ended with {process.returncode}:\n{said.decode(errors='replace')[-3000:]}")


async def run_ours(url: str, trace: Path, directory: Path, seed: int) -> Times:
    found = directory / "ours.jsonl"
    command = [sys.executable, "-m", "neaptide", "loadgen", "replay", str(trace), "--server", url]
    await call([*command, "--seed", str(seed), "--records", str(found), "--html", str(directory / "ours.html")])
    return times_of_ours(found.read_text())


async def run_aiperf(aiperf: Path, url: str, trace: Path, directory: Path, seed: int) -> Times:
    load = ["--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
    counted = ["--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--random-seed", str(seed)]
    quiet = ["--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1"]
    what = ["-m", EMBEDDED.name, "--tokenizer", str(EMBEDDED), "--endpoint-type", "chat", "--streaming", "-u", url]
    out = directory / "aiperf"
    await call([aiperf, "profile", *what, *load, *counted, *quiet, "--output-artifact-dir", str(out)])
    return times_of_aiperf((out / "profile_export.jsonl").read_text())


async def measure(args: argparse.Namespace) -> list[Turn]:
    flags = ["--executor", args.executor, "--log-level", "warning"]
    if args.executor == "sim":
        flags += ["--sim-step-ms", str(SIM_STEP_MS)]
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with ServerProcess(flags, directory) as server:
            for turn in range(args.turns):
                place = directory / f"turn{turn}"
                place.mkdir()
                trace = place / "trace.jsonl"
                trace.write_text(trace_text(args.rate, args.duration_s, args.seed + turn))
                found: dict[str, Times] = {}
                for tool in (OURS, THEIRS) if turn % 2 == 0 else (THEIRS, OURS):
                    if tool == OURS:
                        found[tool] = await run_ours(server.base_url, trace, place, args.seed + turn)
                    else:
                        found[tool] = await run_aiperf(args.aiperf, server.base_url, trace, place, args.seed + turn)
                    print(
                        f"turn {turn + 1}: {tool}: {len(found[tool].ttft)} requests, {found[tool].medians()}",
                        flush=True,
                    )
                turns.append(found)
    return turns


def show(turns: Sequence[Turn], ratios: Mapping[str, Ratio]) -> None:
    rows = []
    for number, turn in enumerate(turns, 1):
        medians = {tool: times.medians() for tool, times in turn.items()}
        for what in AIPERF_NAMES:
            ours, theirs = (medians[tool][what] for tool in (OURS, THEIRS))
            cells = [f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.3f}"]
            rows.append([f"turn {number}, {what.upper()} p50, ms", *cells])
    for what, one in ratios.items():
        interval = f"{one.ratio:.3f} ({one.low:.3f} to {one.high:.3f})"
        rows.append([f"{what.upper()} p50, all requests", "", "", interval])
    print_table("the same load on one server", ["", OURS, THEIRS, "ours / theirs"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", type=Path, required=True, metavar="FILE", help="its command")
    parser.add_argument("--executor", choices=("sim", "torch"), default="sim", help="the server's (sim)")
    # A request waits for the rest of a step: TTFTs scatter evenly over 30 ms; the median of 1,280 is good to 0.4 ms.
    parser.add_argument("--rate", type=float, default=16.0, help="requests/s (16)")
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
    found = {
        "ratios": {what: one.ratio for what, one in ratios.items()},
        "intervals": {what: [one.low, one.high] for what, one in ratios.items()},
        "agree": agree(ratios),
        "is_shown": is_shown(ratios),
        "executor": args.executor,
        "requests": {tool: sum(len(turn[tool].ttft) for turn in turns) for tool in (OURS, THEIRS)},
        "turns": [{tool: times.medians() for tool, times in turn.items()} for turn in turns],
    }
    print(json.dumps(found))
    return 0 if agree(ratios) else 1


if __name__ == "__main__":
    sys.exit(main())

"""W5 in virtual time on vLLM's real scheduler and KV manager: chats beside a batch, on one machine and one load.

Compared are vLLM's ``fcfs``, its ``priority`` at five settings, Neaptide's scheduler inside vLLM, and Neaptide's own
engine in its simulator. Run it with vLLM's interpreter:

    PYTHONPATH=.:lab:vllm-plugin .vllm/bin/python -m lab.benchmarks.vllm_inside [--seeds N] [--seconds S] [--only NAME]

Prints a table of medians over the seeds, then one JSON line with every run.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from statistics import median

from benchmarks.common import print_table
from lab.benchmarks.vllm_inside.runs import LOAD, Figures, measured, rows_of, targets_ms
from neaptide_lab.experiments.w5.machine import LIVE_MACHINE, Bench, Size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=100.0, help="virtual seconds of a run")
    parser.add_argument("--only", nargs="+", choices=rows_of(1.0), metavar="NAME", help="rows to measure")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    window_s = 0.08 * args.seconds, 0.98 * args.seconds
    bench = Bench.of(LIVE_MACHINE, Size((LOAD,), args.seconds, window_s, tuple(range(min(args.seeds, 3)))))
    tpot_slo_s = bench.tpot_slo_s(LOAD)
    names = args.only or list(rows_of(tpot_slo_s))
    runs: list[Figures] = []
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        waited = [pool.submit(measured, name, bench, seed, tpot_slo_s) for seed in range(args.seeds) for name in names]
        for each in as_completed(waited):
            runs.append(each.result())
            print(runs[-1], file=sys.stderr, flush=True)
    columns = list(asdict(runs[0]))[2:]
    rows = [
        [name, *(f"{median(getattr(run, column) for run in runs if run.name == name):.1f}" for column in columns)]
        for name in names
    ]
    print_table("W5 inside vLLM, medians over the seeds", ["", *columns], rows)
    summary = {"targets": targets_ms(tpot_slo_s), "ceiling_tokens_per_s": bench.ceiling_tokens_per_s}
    print(json.dumps(summary | {"runs": [asdict(run) for run in runs]}))


if __name__ == "__main__":
    main()

"""W5 by turns on one vLLM build: who keeps chats in time beside a batch.

Compared are plain vLLM with ``fcfs``, its ``priority`` at five settings, our scheduler inside ``vllm serve``, and
our engine over vLLM's workers (``--executor vllm``). Rate and targets are those of ``benchmarks.same_kernels``.
Every round runs all of them once, each round from another one on, and figures are summed over the rounds: a machine
that other work slows down slows all of them.

    python -m benchmarks.vllm_inside --vllm .vllm/bin/python                              # 60 s a run, three rounds
    python -m benchmarks.vllm_inside --vllm .vllm/bin/python --duration-s 20 --rounds 1
    python -m benchmarks.vllm_inside --vllm .vllm/bin/python --only "vllm fcfs" "ours inside" "vllm priority 8/64"
    python -m benchmarks.vllm_inside --vllm .vllm/bin/python --device cuda                # asynchronous scheduling

Prints a line for each run, then a table and one JSON line. ``best`` is the setting of ``priority`` with the most chats
in time, and among equal ones the most offline tokens.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import model_111m, print_table
from benchmarks.live.plan import LAX_S, TPOT_OVER_ALONE, Plan, Targets, Window, slo_flags
from benchmarks.live.run import run
from benchmarks.same_kernels import find_ceiling
from benchmarks.vllm_server import CPU_KV_GIB, FCFS, MAX_MODEL_LEN, PRIORITY, Machine, Rival, run_rival
from neaptide.executors.torch.device import pick_dtype
from neaptide.loadgen.client.recorder import attainment
from neaptide.loadgen.percentiles import percentiles

LOAD = 0.2
PRIORITY_SETTINGS = ((128, 2048), (16, 2048), (16, 64), (8, 64), (8, 32))
"""``max_num_seqs`` and ``max_num_batched_tokens``; those of ``lab.benchmarks.vllm_inside``."""
PRIORITY_NAMES = {f"vllm priority {seats}/{tokens}": (seats, tokens) for seats, tokens in PRIORITY_SETTINGS}
INSIDE, OUTSIDE = "ours inside", "ours outside"
NAMES = (FCFS.name, INSIDE, *PRIORITY_NAMES, OUTSIDE)


@dataclass(slots=True)
class Sums:
    """Runs of one contender, summed."""

    num_chats: int = 0
    num_in_time: int = 0
    seconds: float = 0.0
    offline_tokens: float = 0.0
    per_round: list[tuple[float, float]] = field(default_factory=list)
    """Fraction of chats in time, and offline tokens/s."""

    def add(self, window: Window, targets: Targets) -> None:
        in_time = attainment(window.records, targets.ttft_s, targets.tpot_s)
        self.num_chats += len(window.records)
        self.num_in_time += round(in_time * len(window.records))
        self.seconds += window.seconds
        self.offline_tokens += window.offline_tokens_per_s * window.seconds
        self.per_round.append((in_time, window.offline_tokens_per_s))

    @property
    def in_time(self) -> float:
        return self.num_in_time / self.num_chats if self.num_chats else 0.0

    @property
    def offline_tokens_per_s(self) -> float:
        return self.offline_tokens / self.seconds if self.seconds else 0.0


Run = Callable[[Plan], Awaitable[Window]]


def contenders(machine: Machine, targets: Targets) -> dict[str, Run]:
    """What is compared, by name."""
    settings = {"neaptide": {"ttft_ms": 1e3 * targets.ttft_s, "tpot_ms": 1e3 * targets.tpot_s}}
    inside = ("--scheduler-cls", "neaptide_vllm.scheduler", "--additional-config", json.dumps(settings))
    rivals = [FCFS, Rival(INSIDE, inside)]
    for name, (seats, tokens) in PRIORITY_NAMES.items():
        flags = (*PRIORITY, "--max-num-seqs", str(seats), "--max-num-batched-tokens", str(tokens))
        rivals.append(Rival(name, flags))
    runs: dict[str, Run] = {rival.name: _beside(machine, rival) for rival in rivals}
    flags = [*machine.our_flags, "--dtype", machine.dtype, *targets.flags]
    return runs | {OUTSIDE: lambda plan: run(plan, flags, online=True, offline=True)}


def _beside(machine: Machine, rival: Rival) -> Run:
    return lambda plan: run_rival(plan, machine, rival, offline=True)


async def targets_of(plan: Plan, machine: Machine) -> Targets:
    """From the faster one of plain vLLM and our engine, with online work alone."""
    lax = [*machine.our_flags, "--dtype", machine.dtype, *slo_flags(LAX_S, LAX_S)]
    probes = [
        await run(plan, lax, online=True, offline=False),
        await run_rival(plan, machine, FCFS, offline=False),
    ]
    return Targets.of_tpot(
        TPOT_OVER_ALONE * min(percentiles(one.tpot_s for one in probe.records).p50 for probe in probes)
    )


def rounds_of(plan: Plan, num_rounds: int) -> list[Plan]:
    """A plan for each round, with arrivals of its own.

    Raises:
        SystemExit: no chat arrives in the window of one.
    """
    rounds = [replace(plan, seed=plan.seed + number) for number in range(num_rounds)]
    begin_s, end_s = plan.window_s
    for one in rounds:
        if not any(begin_s <= at_s < end_s for at_s in one.arrivals_s()):
            raise SystemExit(
                f"at {plan.rate_rps:.3f} chats/s none arrives in the window of seed {one.seed}: lengthen --duration-s"
            )
    return rounds


async def measure(plan: Plan, machine: Machine, num_rounds: int, only: Sequence[str]) -> dict[str, Any]:
    plan = plan.at_load(LOAD, await find_ceiling(plan, machine))
    rounds = rounds_of(plan, num_rounds)
    targets = await targets_of(plan, machine)
    print(f"{plan.rate_rps:.2f} chats/s, TPOT target {1e3 * targets.tpot_s:.1f} ms", flush=True)
    runs = {name: one for name, one in contenders(machine, targets).items() if not only or name in only}
    sums = {name: Sums() for name in runs}
    names = list(runs)
    for number, one in enumerate(rounds):
        first = number * len(names) // num_rounds
        for name in names[first:] + names[:first]:
            window = await runs[name](one)
            sums[name].add(window, targets)
            in_time, offline = sums[name].per_round[-1]
            chats = f"{in_time:.1%} of {len(window.records)} chats in time"
            print(f"round {number}, {name}: {chats}, {offline:.0f} offline tokens/s", flush=True)
    tuned = [name for name in names if name in PRIORITY_NAMES]
    rows = [
        [name, f"{one.in_time:.1%}", f"{one.num_chats}", f"{one.offline_tokens_per_s:.0f}"]
        for name, one in sums.items()
    ]
    print_table("W5 on one vLLM build", ["", "chats in time", "chats", "offline tokens/s"], rows)
    return {
        "targets_ms": {"ttft": 1e3 * targets.ttft_s, "tpot": 1e3 * targets.tpot_s},
        "best": max(tuned, key=lambda name: (sums[name].in_time, sums[name].offline_tokens_per_s), default=None),
        "runs": {
            name: {"in_time": one.in_time, "chats": one.num_chats, "per_round": one.per_round}
            for name, one in sums.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON", help="interpreter with vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=(), metavar="NAME", help="contenders (all)")
    parser.add_argument("--duration-s", type=float, default=60.0, help="duration of a run")
    parser.add_argument("--ceiling-lines", type=int, default=3000, help="offline lines of the first run")
    parser.add_argument("--model", type=Path, help="model directory (the 111M model)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kv_gib = CPU_KV_GIB if args.device == "cpu" else None
    dtype = str(pick_dtype("auto", "bfloat16", torch.device(args.device))).removeprefix("torch.")
    machine = Machine(
        args.vllm.absolute(), args.threads, dtype, args.block_size, kv_gib, True, args.device, MAX_MODEL_LEN
    )
    os.environ.update(machine.environment)  # inherited by our servers and their engines
    window_s = 0.1 * args.duration_s, 0.95 * args.duration_s
    plan = Plan(args.duration_s, window_s, args.model or model_111m(), args.seed, offline_lines=args.ceiling_lines)
    print(json.dumps(asyncio.run(measure(plan, machine, args.rounds, args.only))))


if __name__ == "__main__":
    main()

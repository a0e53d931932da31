"""W5, W1 or W2 on the kernels of one vLLM build: vLLM's own scheduling against ours over its workers.

Machine, model, threads and preloaded libraries are the same; only the scheduler differs. In W5, vLLM runs with
``--scheduling-policy priority`` (online 0, offline 10) at its default number of slots, at 16 and at 32, and with
``fcfs``. Ours runs with ``--executor vllm``. vLLM has no batch files, so its offline lines are plain requests, all sent
at once.

All engines have the same targets, from the fastest engine's run of online work alone: TPOT 2.4 times its TPOT p50, TTFT
5 times that. The rate is ``load`` times our ceiling. Correctness is checked first. Every repeat runs all engines, one
after the other.

    python -m benchmarks.same_kernels --vllm .vllm/bin/python          # 300 s per run, three loads, two repeats
    python -m benchmarks.same_kernels --vllm .vllm/bin/python --quick  # 60 s, load 0.20, vLLM with default and 16 slots
    python -m benchmarks.same_kernels --vllm .vllm/bin/python --workload W1    # or W2 (see ``same_kernels_offline``)

Prints a table for each load, then one JSON line. Its ``bars`` compare ours with online work alone and with vLLM.
``--keep DIR`` keeps the step logs of our runs of W5, from which ``benchmarks.live.late`` explains late chats.
``--part NAME --state FILE`` runs one part of W5 at one load. The order of the parts is: ceiling (with the check of
texts), targets, ours, rivals. FILE has the results of earlier parts, and the last line covers all parts so far.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import same_kernels_offline
from benchmarks.common import model_111m
from benchmarks.live import late
from benchmarks.live.latency import percentile_of_all, tpots_s, ttft_p99_ratio
from benchmarks.live.plan import CEILING_LINES, LAX_S, TPOT_OVER_ALONE, Case, Plan, Targets, Window, slo_flags
from benchmarks.live.run import check, run
from benchmarks.live.tables import print_runs, summary
from benchmarks.vllm_server import CPU_KV_GIB, FCFS, MAX_MODEL_LEN, PRIORITY_RIVALS, Machine, Rival, run_rival
from neaptide.executors.torch.device import pick_dtype
from neaptide.loadgen.client.recorder import attainment
from neaptide.loadgen.percentiles import percentiles

LOADS = (0.20, 0.10, 0.40)
OURS = "ours over vLLM's workers"
RIVALS = (*PRIORITY_RIVALS, FCFS)
ALONE, VLLM_ALONE = "ours, online alone", f"{RIVALS[0].name}, online alone"
PARTS = ("ceiling", "targets", "ours", "rivals")
"""Parts of W5."""
SERVERS_OF_A_PART = 2
"""Most servers of a part with ``--quick``; they run one after the other."""
QUICK_S = 60.0


@dataclass(slots=True)
class LoadRuns:
    """Runs at one load, as far as they have been measured."""

    load: float
    seed: int
    tpot_s: float = 0.0
    """The target; 0: no probe has run."""
    windows: dict[str, Window] = field(default_factory=dict)

    @property
    def targets(self) -> Targets:
        return Targets.of_tpot(self.tpot_s)

    def keep(self, name: str, window: Window) -> None:
        self.windows[name] = window
        shown = summary(name, window, self.targets.ttft_s, self.targets.tpot_s)
        print(f"{name}: {json.dumps(shown)}", flush=True)  # now, so that a run that is cut short shows it

    def result(self, rate_rps: float) -> dict[str, Any]:
        rivals = [rival.name for rival in RIVALS if rival.name in self.windows]
        order = [name for name in (ALONE, VLLM_ALONE, OURS, *rivals) if name in self.windows]
        has_bars = {ALONE, OURS} <= self.windows.keys()
        ttft_s, tpot_s = self.targets.ttft_s, self.targets.tpot_s
        return {
            "load": self.load,
            "rate_rps": round(rate_rps, 3),
            "targets_ms": {"ttft": round(1e3 * ttft_s, 1), "tpot": round(1e3 * tpot_s, 1)},
            "bars": bars(self.windows, rivals, self.targets) if has_bars else None,
            "runs": [summary(name, self.windows[name], ttft_s, tpot_s) for name in order],
        }


async def find_targets(plan: Plan, machine: Machine, runs: LoadRuns) -> None:
    """Runs online work alone on both engines, without targets. vLLM's run is also shown."""
    lax = [*machine.our_flags, "--dtype", machine.dtype, *slo_flags(LAX_S, LAX_S)]
    probes = [await run(plan, lax, online=True, offline=False)]
    probes.append(await run_rival(plan, machine, RIVALS[0], offline=False))
    runs.tpot_s = TPOT_OVER_ALONE * min(percentiles(r.tpot_s for r in probe.records).p50 for probe in probes)
    print(f"load {runs.load}: {plan.rate_rps:.2f} requests/s, TPOT target {1e3 * runs.tpot_s:.0f} ms", flush=True)
    runs.keep(VLLM_ALONE, probes[1])


async def measure_ours(plan: Plan, machine: Machine, runs: LoadRuns, kept_in: Path | None) -> None:
    """Runs our engine on online work alone, and with the batch."""
    flags = [*machine.our_flags, "--dtype", machine.dtype, *runs.targets.flags]
    for name, short, offline in ((ALONE, "alone", False), (OURS, "beside", True)):
        path = None if kept_in is None else late.path_of(kept_in, Case(runs.load), plan.seed, short)
        runs.keep(name, await late.run_kept(path, plan, flags, runs.targets, offline=offline))


async def measure_rivals(plan: Plan, machine: Machine, runs: LoadRuns, rivals: Sequence[Rival]) -> None:
    for rival in rivals:
        runs.keep(rival.name, await run_rival(plan, machine, rival, offline=True))


async def measure_load(
    plan: Plan, machine: Machine, rivals: Sequence[Rival], load: float, ceiling_per_s: float, kept_in: Path | None
) -> dict[str, Any]:
    """Measures all engines at one load, one after the other."""
    plan, runs = plan.at_load(load, ceiling_per_s), LoadRuns(load, plan.seed)
    await find_targets(plan, machine, runs)
    await measure_ours(plan, machine, runs, kept_in)
    await measure_rivals(plan, machine, runs, rivals)
    return runs.result(plan.rate_rps)


def bars(windows: Mapping[str, Window], rivals: Sequence[str], targets: Targets) -> dict[str, Any]:
    """The quantities that have bars, as measured. A ratio of latencies is None if one of them is infinite."""

    def met(name: str) -> float:
        return attainment(windows[name].records, targets.ttft_s, targets.tpot_s)

    def tpot_p50_s(name: str) -> float:
        return percentile_of_all(tpots_s(windows[name].records), 0.5)

    ours = windows[OURS]
    as_good = [name for name in rivals if tpot_p50_s(name) <= tpot_p50_s(OURS)]
    best = max((windows[name].offline_tokens_per_s for name in as_good), default=None)
    return {
        "attainment_minus_alone": round(met(OURS) - met(ALONE), 4),
        "ttft_p99_vs_alone": ttft_p99_ratio(ours.records, windows[ALONE].records),
        "rivals_with_equal_or_better_tpot_p50": as_good,
        "offline_vs_best_of_those": None if not best else round(ours.offline_tokens_per_s / best, 4),
    }


async def find_ceiling(plan: Plan, machine: Machine) -> float:
    """Our offline tokens/s without online work."""
    lax = [*machine.our_flags, "--dtype", machine.dtype, *slo_flags(LAX_S, LAX_S)]
    ceiling = await run(plan, lax, online=False, offline=True)
    print(f"ceiling: {ceiling.offline_tokens_per_s:.0f} tok/s", flush=True)
    return ceiling.offline_tokens_per_s


async def measure(plan: Plan, machine: Machine, rivals: Sequence[Rival], args: argparse.Namespace) -> dict[str, Any]:
    ceiling_per_s = await find_ceiling(plan, machine)
    loads = [
        await measure_load(replace(plan, seed=plan.seed + repeat), machine, rivals, load, ceiling_per_s, args.keep)
        for repeat in range(args.repeats)
        for load in args.loads
    ]
    return {"ceiling": round(ceiling_per_s, 1), "loads": loads}


# ---- in parts, each in its own process ----------------------------------------------------------------------------


@dataclass(slots=True)
class State:
    """Results of the parts that have run, for those that follow."""

    checked_tokens: int = 0
    ceiling_per_s: float = 0.0
    loads: list[LoadRuns] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "State":
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def of_load(self, load: float, seed: int) -> LoadRuns:
        for runs in self.loads:
            if (runs.load, runs.seed) == (load, seed):
                return runs
        self.loads.append(LoadRuns(load, seed))
        return self.loads[-1]

    def result(self, plan: Plan) -> dict[str, Any]:
        return {
            "checked_tokens": self.checked_tokens,
            "ceiling": round(self.ceiling_per_s, 1),
            "loads": [
                runs.result(plan.at_load(runs.load, self.ceiling_per_s).rate_rps) for runs in self.loads if runs.tpot_s
            ],
        }


async def measure_part(part: str, plan: Plan, machine: Machine, state: State, args: argparse.Namespace) -> None:
    """Runs one part.

    Raises:
        SystemExit: an earlier part that it needs has not run.
    """
    if part == "ceiling":
        state.ceiling_per_s = await find_ceiling(plan, machine)
        state.loads.clear()  # they were fractions of the old ceiling
        return
    if not state.ceiling_per_s:
        raise SystemExit("run --part ceiling first: it sets the rate of all others")
    runs = state.of_load(args.loads[0], plan.seed)
    plan = plan.at_load(runs.load, state.ceiling_per_s)
    if part == "targets":
        return await find_targets(plan, machine, runs)
    if not runs.tpot_s:
        raise SystemExit(f"run --part targets of load {runs.load} first: it sets the targets")
    if part == "ours":
        return await measure_ours(plan, machine, runs, args.keep)
    await measure_rivals(plan, machine, runs, RIVALS[:SERVERS_OF_A_PART] if args.quick else RIVALS)


def check_texts(model: Path, machine: Machine) -> int:
    """Compares texts in fp32, before anything is timed. Returns how many tokens agree with ``transformers``."""
    checked = asyncio.run(check(Plan(0.0, (0.0, 0.0), model, 0), machine.our_flags))
    print(f"correctness: {checked} tokens agree with transformers", flush=True)
    return checked


def main() -> None:
    args = parsed()
    is_cpu = args.device == "cpu"
    kv_gib = args.kv_gib if args.kv_gib is not None or not is_cpu else CPU_KV_GIB
    model = args.model or model_111m()
    machine = Machine(
        args.vllm.absolute(), args.threads, args.dtype, args.block_size, kv_gib, args.eager, args.device, MAX_MODEL_LEN
    )
    os.environ.update(machine.environment)  # inherited by our servers and their engines
    state = State() if args.state is None else State.read(args.state)
    if args.part in (None, "ceiling"):
        state.checked_tokens = check_texts(args.check_model or model, machine)
    if args.workload == "W5":
        args.repeats = 1 if args.quick else args.repeats or 2
        args.loads = args.loads or (LOADS[:1] if args.quick else LOADS)
        duration_s = args.duration_s or (QUICK_S if args.quick else 300.0)
        # The first tenth is warm-up; the time after the window lets streams end.
        window_s = (0.1 * duration_s, 0.95 * duration_s)
        plan = Plan(duration_s, window_s, model, args.seed, offline_lines=args.ceiling_lines)
        if args.part is not None:
            asyncio.run(measure_part(args.part, plan, machine, state, args))
            args.state.write_bytes(msgspec.json.encode(state))
            result = state.result(plan)
        else:
            result = asyncio.run(measure(plan, machine, RIVALS[:SERVERS_OF_A_PART] if args.quick else RIVALS, args))
        for load in result["loads"]:
            print_runs(f"same kernels, {model.name}, load {load['load']}", load["runs"])
        print(json.dumps({"checked_tokens": state.checked_tokens} | result))
        return
    repeats = 1 if args.quick else args.repeats or 6
    offline = same_kernels_offline.measure(
        args.workload, model, machine, FCFS, count=args.requests, repeats=repeats, seed=args.seed
    )
    same_kernels_offline.print_result({"checked_tokens": state.checked_tokens} | asyncio.run(offline))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON", help="interpreter with vLLM")
    parser.add_argument("--workload", choices=("W5", *same_kernels_offline.WORKLOADS), default="W5")
    parser.add_argument("--quick", action="store_true", help="no repeat; W5: 60 s per run, load 0.20, two rivals")
    parser.add_argument("--repeats", type=int, help="(2 for W5, else 6); multiples of 3 favour no contender's place")
    parser.add_argument("--loads", type=float, nargs="+", help="loads of W5 (0.20 0.10 0.40)")
    parser.add_argument("--requests", type=int, default=64, help="requests of W1 and W2")
    parser.add_argument("--duration-s", type=float, help="duration of a run of W5 (300, or 60 with --quick)")
    parser.add_argument(
        "--ceiling-lines",
        type=int,
        default=CEILING_LINES,
        help="offline lines of W5's first run; they must not run out",
    )
    parser.add_argument("--part", choices=PARTS, help="part of W5 at one load; needs --state")
    parser.add_argument("--state", type=Path, metavar="FILE", help="results of the parts that have run")
    parser.add_argument("--keep", type=late.kept_in, metavar="DIR", help="keep the step logs of our runs of W5")
    parser.add_argument("--model", type=Path, help="model directory (the 111M model)")
    parser.add_argument("--check-model", type=Path, help="model whose answers are checked (the same model)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", help="(bfloat16, or float32 on a CPU that would emulate bfloat16)")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--kv-gib", type=float, help="(4 on a CPU; vLLM's default fraction on a GPU)")
    parser.add_argument("--eager", action="store_true", help="compile the model in neither engine")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.workload != "W5" and args.device != "cpu":
        parser.error("W1 and W2 keep both servers running, for which a GPU has no memory")
    if (args.part is None) != (args.state is None):
        parser.error("--part and --state need each other")
    if args.part is not None and (args.workload != "W5" or args.repeats or len(args.loads or [0]) > 1):
        parser.error("--part is for W5 at one load, once")
    if args.dtype is None:
        args.dtype = str(pick_dtype("auto", "bfloat16", torch.device(args.device))).removeprefix("torch.")
    return args


if __name__ == "__main__":
    main()

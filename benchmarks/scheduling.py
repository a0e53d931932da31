"""Measures the engine's own cost: plan, apply and commit of a step, with an executor that does nothing.

    python -m benchmarks.scheduling [--running N] [--online N] [--waiting N] [--pooled N] [--steps N] [--touched-mib N]
        [--before DIR] [--profile]
    python -m benchmarks.scheduling --bars [--pooled N] [--steps N]

``--before`` names another checkout of this project, which this benchmark measures first. ``--waiting`` is three times
overload: so many more online requests wait, three arrive for each that ends, the oldest give up. ``--bars`` measures
at 100 and at 1,000 running requests, with and without streams. It reports which bars hold at p99 and what disturbed the
slow steps, and exits with 1 if a bar does not hold; it needs an idle machine. ``--touched-mib`` makes the executor
touch this much memory in every step, as a model on the same CPU does: planning then finds the caches cold.
"""

import argparse
import cProfile
import gc
import json
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AbortRequest, AddBatch, AddRequest
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.steps.plan import StepPlan, StepResult
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel

PROMPT_TOKENS = 250
MAX_TOKENS = 2_000
"""Large, so that no request ends while steps are measured."""
STEP_S = 0.05
BARS_MS = {100: 0.15, 1000: 0.5}
"""Number of running requests, and the longest time at p99 of a step's plan, apply and commit."""
NUM_SLOWEST = 5
CROWD_TOKENS = 50
"""Mean tokens of an answer of the crowd that waits."""
CROWD_STEPS = 150
"""Steps until the crowd is mixed: running, waiting in time, and late."""
OVERLOAD = 3


class HostClock:
    """A clock on which real time passes while the host works, and none while it waits for the device. Implements
    ``Clock``."""

    def __init__(self) -> None:
        self._skipped_s = -time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() + self._skipped_s

    def sleep_until(self, t_s: float) -> None:
        self._skipped_s += max(t_s - self.now(), 0.0)


class NullExecutor:
    """An executor whose steps take ``STEP_S`` and always sample the same token. Implements ``Executor``."""

    def __init__(self, num_blocks: int, clock: HostClock, touched_mib: int = 0) -> None:
        self.num_blocks = num_blocks
        self._clock = clock
        self._touched = np.zeros(touched_mib << 17)
        self._result = StepResult(np.zeros(0, np.int64))

    def submit(self, plan: StepPlan) -> "NullExecutor":
        self._result = StepResult(np.full(len(plan), 7))
        return self

    def wait(self) -> StepResult:
        self._touched += 1.0
        self._clock.sleep_until(self._clock.now() + STEP_S)
        return self._result

    def close(self) -> None: ...


def write_pool(stem: str, pooled: int) -> None:
    """Writes a batch of prompts that share no prefix."""
    rng = np.random.default_rng(1)
    with TokenFileWriter(stem) as writer:
        for _ in range(pooled):
            writer.append(rng.integers(6, 32_000, PROMPT_TOKENS, dtype=np.int32))


def build(
    running: int,
    online: int,
    pooled: int,
    policy: str,
    stem: str,
    touched_mib: int = 0,
    clock: HostClock | None = None,
) -> EngineCore:
    """An engine with these streams and the batch of ``stem``."""
    clock = clock or HostClock()
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=running, tpot_slo_s=1.0, offline_max_kv_ratio=1.0)
    num_blocks = running * (PROMPT_TOKENS + MAX_TOKENS) // 16 + 1000
    cost_model = OnlineCostModel(RooflineModel.generic())
    executor = NullExecutor(num_blocks, clock, touched_mib)
    headroom = FixedHeadroom(num_blocks, 0.0)
    config = EngineConfig(cache=CacheConfig(), scheduler=scheduler)
    core = EngineCore(config, executor, cost_model, headroom, clock)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for index in range(online):
        prompt = rng.integers(6, 32_000, PROMPT_TOKENS).tolist()
        core.handle(AddRequest(f"online-{index}", prompt, params, Tier.DEFAULT, -1e-6 * index, 10.0, 1.0))
    rows = list(range(pooled))
    before_bytes = resident_bytes()
    core.handle(AddBatch("job", stem, rows, [params], [0] * pooled, [], 1e9))
    print(f"{(resident_bytes() - before_bytes) / max(pooled, 1):.0f} bytes of memory per pooled row")
    return core


class Crowd:
    """Online requests at ``OVERLOAD`` times what the seats serve, of which so many wait."""

    def __init__(self, core: EngineCore, clock: HostClock, running: int, waiting: int) -> None:
        self._core, self._clock, self._waiting = core, clock, waiting
        self._arrivals = OVERLOAD * running // CROWD_TOKENS
        self._rng = np.random.default_rng(3)
        self._count = 0
        self._arrive(waiting)

    def go_on(self) -> None:
        """Those of one step arrive, and the oldest give up."""
        self._arrive(self._arrivals)
        waiting = sorted(self._core.scheduler.queues.waiting_online, key=lambda request: request.arrival_s)
        self._core.handle(AbortRequest([request.request_id for request in waiting[: -self._waiting]]))

    def _arrive(self, count: int) -> None:
        for _ in range(count):
            prompt = self._rng.integers(6, 32_000, self._rng.integers(50, 1500)).tolist()
            params = SamplingParams(max_tokens=int(self._rng.integers(20, 2 * CROWD_TOKENS - 20)))
            self._count += 1
            now_s = self._clock.now()
            self._core.handle(AddRequest(f"crowd-{self._count}", prompt, params, Tier.DEFAULT, now_s, 2.0, 0.2))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass(slots=True, frozen=True)
class StepTime:
    """Times of one step, and events that may have disturbed it."""

    plan_ms: float
    """Time of plan, apply and commit."""
    step_ms: float
    """Time of all host work."""
    cpu_ms: float
    """CPU time of all host work, which excludes other processes."""
    num_collections: int
    """Garbage collections of any generation."""
    num_interrupted: int
    num_faults: int
    """Pages touched for the first time."""

    @property
    def disturbances(self) -> list[str]:
        """Names of the disturbances from outside the engine."""
        found = {
            "garbage collected": self.num_collections,
            "interrupted": self.num_interrupted,
            "new pages": self.num_faults,
        }
        return [name for name, count in found.items() if count]


@dataclass(slots=True)
class Disturbances:
    """Counts events that disturb this thread."""

    _collections: int = 0
    _last: tuple[int, int, int] = field(default=(0, 0, 0))

    def watch(self) -> None:
        gc.callbacks.append(self._collected)

    def since_last(self) -> tuple[int, int, int]:
        """Garbage collections, involuntary context switches and page faults since the last call."""
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        now = (self._collections, usage.ru_nivcsw, usage.ru_minflt)
        before, self._last = self._last, now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    def end(self) -> None:
        gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        self._collections += phase == "stop"


def measure(core: EngineCore, running: int, steps: int, crowd: Crowd | None = None) -> list[StepTime]:
    """Measures steps with this many running requests, or with the crowd. Garbage of the start-up is frozen, as in the
    server."""
    while crowd is None and core.scheduler.queues.num_running < running:
        core.step()
    for _ in range(20 if crowd is None else CROWD_STEPS):
        if crowd is not None:
            crowd.go_on()
        core.step()
    gc.collect()
    gc.freeze()
    disturbances = Disturbances()
    disturbances.watch()
    measured: list[StepTime] = []
    for _ in range(steps):
        if crowd is not None:
            crowd.go_on()
        disturbances.since_last()
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        (stats,) = core.step().stats
        cpu_ms = (time.thread_time() - start_cpu_s) * 1e3
        step_ms = (time.perf_counter() - start_s) * 1e3
        plan_ms = (stats.schedule_s + stats.commit_s) * 1e3
        measured.append(StepTime(plan_ms, step_ms, cpu_ms, *disturbances.since_last()))
    disturbances.end()
    gc.unfreeze()
    return measured


def figures_of(measured: Sequence[StepTime]) -> dict[str, float]:
    figures = {"step_mean_ms": statistics.fmean(each.step_ms for each in measured)}
    of = {"step": "step_ms", "step_cpu": "cpu_ms", "plan_apply_commit": "plan_ms"}
    for name, attribute in of.items():
        values = [getattr(each, attribute) for each in measured]
        figures |= {f"{name}_p50_ms": statistics.median(values), f"{name}_p99_ms": p99(values)}
    return figures


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def bars(policy: str, pooled: int, steps: int, stem: str) -> list[dict[str, object]]:
    """Measures each size and compares it with its bar; prints each result at once."""
    found: list[dict[str, object]] = []
    for running, bar_ms in BARS_MS.items():
        for online in (0, running // 4):
            measured = measure(build(running, online, pooled, policy, stem), running, steps)
            found.append({"running": running, "online": online, **verdict(measured, bar_ms)})
            print(json.dumps(found[-1]), flush=True)
            for each in sorted(measured, key=lambda each: -each.plan_ms)[:NUM_SLOWEST]:
                why = ", ".join(each.disturbances) or "undisturbed"
                print(f"  {each.plan_ms:7.3f} ms, {each.cpu_ms:7.3f} of CPU time for the whole step: {why}")
    return found


def verdict(measured: Sequence[StepTime], bar_ms: float) -> dict[str, object]:
    """Percentiles of plan, apply and commit; steps above the bar without a disturbance; steps with each kind of
    disturbance."""
    times_ms = [each.plan_ms for each in measured]
    above = [each for each in measured if each.plan_ms > bar_ms]
    return {
        "p10_ms": round(statistics.quantiles(times_ms, n=10)[0], 3),
        "p50_ms": round(statistics.median(times_ms), 3),
        "p99_ms": round(p99(times_ms), 3),
        "bar_p99_ms": bar_ms,
        "holds": p99(times_ms) <= bar_ms,
        "steps": len(measured),
        "above_bar": len(above),
        "above_bar_undisturbed": sum(not each.disturbances for each in above),
        "disturbed": dict(Counter(name for each in measured for name in each.disturbances)),
    }


def before(directory: Path, args: argparse.Namespace) -> dict[str, float]:
    """Runs this measurement with the other checkout's engine."""
    names = ("running", "online", "waiting", "pooled", "steps", "policy")
    command = [sys.executable, __file__, *(f"--{name}={getattr(args, name)}" for name in names)]
    done = subprocess.run(
        command, cwd=directory, env={"PYTHONPATH": str(directory)}, capture_output=True, text=True, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {name: value for name, value in figures.items() if name.endswith("_ms")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=1000)
    parser.add_argument("--online", type=int, default=250)
    parser.add_argument("--waiting", type=int, default=0, help="online requests that wait; --online should be 0 (0)")
    parser.add_argument("--pooled", type=int, default=400_000)
    parser.add_argument("--steps", type=int, help="(300; with --bars 1000)")
    parser.add_argument("--policy", default="neaptide")
    parser.add_argument("--touched-mib", type=int, default=0)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--profile", action="store_true", help="print a profile")
    parser.add_argument("--bars", action="store_true", help="measure all sizes that have a bar")
    args = parser.parse_args()
    args.steps = args.steps or (1000 if args.bars else 300)
    with tempfile.TemporaryDirectory() as directory:
        stem = str(Path(directory) / "job")
        write_pool(stem, args.pooled)
        if args.bars:
            found = bars(args.policy, args.pooled, args.steps, stem)
            print(json.dumps({"policy": args.policy, "pooled": args.pooled, "sizes": found}))
            return 0 if all(each["holds"] for each in found) else 1
        one_size(args, stem)
        return 0


def one_size(args: argparse.Namespace, stem: str) -> None:
    result: dict[str, object] = {}
    if args.before is not None:
        result["before"] = before(args.before, args)
    clock = HostClock()
    core = build(args.running, args.online, args.pooled, args.policy, stem, args.touched_mib, clock)
    crowd = Crowd(core, clock, args.running, args.waiting) if args.waiting else None
    figures = figures_of(measure(core, args.running, args.steps, crowd))
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, core, args.running, args.steps, crowd)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    for name, value in figures.items():
        print(f"{name:24} {value:8.3f}")
    given = {name: value for name, value in vars(args).items() if name not in ("before", "bars")}
    print(json.dumps(given | figures | result))


if __name__ == "__main__":
    sys.exit(main())

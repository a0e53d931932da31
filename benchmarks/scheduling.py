"""What the engine itself costs: plan, apply and commit of a step, with an executor that does nothing.

``python -m benchmarks.scheduling [--running N] [--online N] [--pooled N] [--steps N] [--before DIR] [--profile]``

``--before`` names another checkout of this project; its own form of this benchmark runs in turn with this one.
"""

import argparse
import cProfile
import json
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AddBatch, AddRequest
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.steps.plan import StepPlan, StepResult
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel

PROMPT_TOKENS = 250
MAX_TOKENS = 2_000
"""No request ends while steps are measured."""
STEP_S = 0.05


class HostClock:
    """Implements ``Clock``: real time passes while the host works, and none while it waits for the device."""

    def __init__(self) -> None:
        self._skipped_s = -time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() + self._skipped_s

    def sleep_until(self, t_s: float) -> None:
        self._skipped_s += max(t_s - self.now(), 0.0)


class NullExecutor:
    """Implements ``Executor``: every step takes ``STEP_S`` and samples one and the same token."""

    def __init__(self, num_blocks: int, clock: HostClock) -> None:
        self.num_blocks = num_blocks
        self._clock = clock
        self._result = StepResult(np.zeros(0, np.int64))

    def submit(self, plan: StepPlan) -> "NullExecutor":
        self._result = StepResult(np.full(len(plan), 7))
        return self

    def wait(self) -> StepResult:
        self._clock.sleep_until(self._clock.now() + STEP_S)
        return self._result

    def close(self) -> None: ...


def build(running: int, online: int, pooled: int, policy: str, directory: Path) -> EngineCore:
    clock = HostClock()
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=running, tpot_slo_s=1.0, offline_max_kv_ratio=1.0)
    num_blocks = running * (PROMPT_TOKENS + MAX_TOKENS) // 16 + 1000
    cost_model = OnlineCostModel(RooflineModel.generic())
    executor = NullExecutor(num_blocks, clock)
    headroom = FixedHeadroom(num_blocks, 0.0)
    config = EngineConfig(cache=CacheConfig(), scheduler=scheduler)
    core = EngineCore(config, executor, cost_model, headroom, clock)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for index in range(online):
        prompt = rng.integers(6, 32_000, PROMPT_TOKENS).tolist()
        core.handle(AddRequest(f"online-{index}", prompt, params, Tier.DEFAULT, -1e-6 * index, 10.0, 1.0))
    stem = str(directory / "job")
    with TokenFileWriter(stem) as writer:
        for _ in range(pooled):
            writer.append(rng.integers(6, 32_000, PROMPT_TOKENS).tolist())
    rows = list(range(pooled))
    before_bytes = resident_bytes()
    core.handle(AddBatch("job", stem, rows, [params], [0] * pooled, [], 1e9))
    print(f"{(resident_bytes() - before_bytes) / max(pooled, 1):.0f} bytes of memory per pooled row")
    return core


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(core: EngineCore, running: int, steps: int) -> dict[str, float]:
    while core.scheduler.queues.num_running < running:
        core.step()
    for _ in range(20):
        core.step()
    step_ms: list[float] = []
    cpu_ms: list[float] = []
    planning_and_commit_ms: list[float] = []
    for _ in range(steps):
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        (stats,) = core.step().stats
        cpu_ms.append((time.thread_time() - start_cpu_s) * 1e3)
        step_ms.append((time.perf_counter() - start_s) * 1e3)
        planning_and_commit_ms.append((stats.schedule_s + stats.commit_s) * 1e3)
    return {
        "step_mean_ms": statistics.fmean(step_ms),
        "step_p50_ms": statistics.median(step_ms),
        "step_p99_ms": statistics.quantiles(step_ms, n=100)[98],
        # What neighbours on the machine take is not in these.
        "step_cpu_p50_ms": statistics.median(cpu_ms),
        "step_cpu_p99_ms": statistics.quantiles(cpu_ms, n=100)[98],
        "plan_apply_commit_p50_ms": statistics.median(planning_and_commit_ms),
        "plan_apply_commit_p99_ms": statistics.quantiles(planning_and_commit_ms, n=100)[98],
    }


def before(directory: Path, args: argparse.Namespace) -> dict[str, float]:
    """The other checkout's own measurement; its executor makes up a token for every request."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("running", "online", "pooled", "steps", "policy")]
    command = [sys.executable, "-m", "benchmarks.scheduling", *sizes]
    done = subprocess.run(
        command, cwd=directory, env={"PYTHONPATH": str(directory)}, capture_output=True, text=True, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {name: value for name, value in figures.items() if name.endswith("_ms")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=1000)
    parser.add_argument("--online", type=int, default=250)
    parser.add_argument("--pooled", type=int, default=400_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--policy", default="neaptide")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    args = parser.parse_args()
    result: dict[str, object] = {}
    if args.before is not None:
        result["before"] = before(args.before, args)
    with tempfile.TemporaryDirectory() as directory:
        core = build(args.running, args.online, args.pooled, args.policy, Path(directory))
        figures = measure(core, args.running, args.steps)
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(measure, core, args.running, args.steps)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    for name, value in figures.items():
        print(f"{name:24} {value:8.3f}")
    print(json.dumps({name: value for name, value in vars(args).items() if name != "before"} | figures | result))


if __name__ == "__main__":
    main()

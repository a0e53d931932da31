"""How long planning and committing a step takes, on a virtual clock with simulated steps.

``python -m benchmarks.scheduling [--running N] [--online N] [--pooled N] [--steps N]``
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AddBatch, AddRequest
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import SamplingParams, Tier
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.executors.simulated.hash_executor import SimExecutor

PROMPT_TOKENS = 250
MAX_TOKENS = 2_000
"""Nobody ends while steps are measured."""


def build(running: int, online: int, pooled: int, policy: str, directory: Path) -> EngineCore:
    clock = VirtualClock()
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=running, tpot_slo_s=1.0, offline_max_kv_ratio=1.0)
    num_blocks = running * (PROMPT_TOKENS + MAX_TOKENS) // 16 + 1000
    cost_model = OnlineCostModel(RooflineModel.generic())
    executor = SimExecutor(num_blocks, cost_model, clock, vocab_size=32_000)
    headroom = FixedHeadroom(num_blocks, 0.0)
    config = EngineConfig(cache=CacheConfig(), scheduler=scheduler)
    core = EngineCore(config, executor, cost_model, headroom, clock)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for index in range(online):
        prompt = rng.integers(6, 32_000, PROMPT_TOKENS).tolist()
        core.handle(AddRequest(f"online-{index}", prompt, params, Tier.DEFAULT, 0.0, 10.0, 1.0))
    stem = str(directory / "job")
    with TokenFileWriter(stem) as writer:
        for _ in range(pooled):
            writer.append(rng.integers(6, 32_000, PROMPT_TOKENS).tolist())
    rows = list(range(pooled))
    core.handle(AddBatch("job", stem, rows, [params], [0] * pooled, [], 1e9))
    return core


def measure(core: EngineCore, running: int, steps: int) -> dict[str, float]:
    while core.scheduler.queues.num_running < running:
        core.step()
    for _ in range(20):
        core.step()
    schedule_ms: list[float] = []
    step_ms: list[float] = []
    plan = core.scheduler.schedule

    def timed(now_s: float) -> object:
        start_s = time.perf_counter()
        result = plan(now_s)
        schedule_ms.append((time.perf_counter() - start_s) * 1e3)
        return result

    core.scheduler.schedule = timed  # type: ignore[method-assign,assignment]
    for _ in range(steps):
        start_s = time.perf_counter()
        core.step()
        step_ms.append((time.perf_counter() - start_s) * 1e3)
    return {
        "schedule_mean_ms": statistics.fmean(schedule_ms),
        "schedule_p99_ms": statistics.quantiles(schedule_ms, n=100)[98],
        "step_mean_ms": statistics.fmean(step_ms),
        "step_p99_ms": statistics.quantiles(step_ms, n=100)[98],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--online", type=int, default=64)
    parser.add_argument("--pooled", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--policy", default="neaptide")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        core = build(args.running, args.online, args.pooled, args.policy, Path(directory))
        result = measure(core, args.running, args.steps)
    for name, value in result.items():
        print(f"{name:20} {value:8.3f}")
    print(json.dumps(vars(args) | result))


if __name__ == "__main__":
    main()

"""Offline work alone in steps of several lengths: its rate, and the rate that the machine's profile predicts.

The profile is measured first, as ``neaptide calibrate`` does. Then engines over our executor take turns: one chooses
its steps freely, the others may not exceed a length. Lines always wait. Each computed step is also predicted, so that
both rates are of the same steps. The calibration's reference step is timed before and after each turn, and predictions
are scaled by its change since the calibration: neighbours make a machine slower or faster.

    python -m lab.benchmarks.step_lengths [--lengths-ms 39 100 350] [--seconds 20] [--turns 3] [--smoke]

Prints a table, then one JSON line: whether the profile errs by at most ``CLOSE`` at every length, and the free rate
over the best limited one. ``--smoke`` uses the embedded model; the calibration takes two minutes all the same.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import EMBEDDED, machine, model_111m, print_table, random_prompts, vocab_size
from benchmarks.engine_runs import Engine
from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, ProfileConfig, SchedulerConfig
from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.judgement import UNKNOWN_WAIT
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.estimator.calibration.calibrate import FULL
from neaptide.estimator.calibration.micro_runs import MicroRunner
from neaptide.estimator.calibration.steps import REFERENCE
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import save_profile
from neaptide.launch.calibrating import calibrate_model

CLOSE = 0.05
PROMPT_TOKENS, NEW_TOKENS = 256, 64
LINES, MAX_NUM_SEQS = 160, 64
"""Lines of a turn, of which none must be the last one, and how many of them hold memory at once."""
MAX_MODEL_LEN, BLOCK_SIZE = 512, 16
WARM_UP_S = 6.0
REFERENCE_RUNS = 15
"""Runs of the reference step before and after a turn."""
FREE = "free"


@dataclass
class Watched(EngineObserver):
    """Sums over the committed steps, while it is on."""

    model: RooflineModel
    """The measured profile, without what the engine has learned since."""
    is_on: bool = False
    steps: int = 0
    tokens: int = 0
    executed_s: float = 0.0
    predicted_s: float = 0.0
    total_s: float = 0.0
    """With planning and committing."""

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        if not self.is_on:
            return
        timer = step.timer
        self.steps += 1
        self.tokens += step.plan.shape.num_tokens
        self.executed_s += timer.execute_s
        self.total_s += timer.schedule_s + timer.execute_s + timer.commit_s
        self.predicted_s += self.model.predict(step.plan.shape).seconds


@dataclass(frozen=True)
class Turn:
    step_ms: float
    tokens_per_s: float
    speed: float
    """The machine's speed divided by its speed during the calibration."""
    error: float
    """Predicted over real rate, less 1."""


def engine_of(model: Path, profile: Path, length_s: float | None, threads: int, dtype: str) -> Engine:
    """An engine whose steps of offline work alone take at most so long; None lets the policy choose."""
    ttft_s, tpot_s = (3600.0, 0.1) if length_s is None else (length_s / UNKNOWN_WAIT, length_s)
    return Engine(
        EngineConfig(
            cache=CacheConfig(num_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE, block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(
                max_num_seqs=MAX_NUM_SEQS,
                max_model_len=MAX_MODEL_LEN,
                offline_max_kv_ratio=1.0,
                delivery_latency_s=0.0,
                ttft_slo_s=ttft_s,
                tpot_slo_s=tpot_s,
            ),
            executor=ExecutorConfig(model_path=str(model), device="cpu", dtype=dtype, num_threads=threads),
            profile=ProfileConfig(name=str(profile)),
        )
    )


def reference_s(engine: Engine) -> float:
    """Time of the reference step on an idle engine."""
    runner = MicroRunner(engine.core._executor._executor, MonotonicClock(), BLOCK_SIZE)
    return statistics.median(runner.run(REFERENCE) for _ in range(REFERENCE_RUNS))


def turn(engine: Engine, model: Path, seconds: float, seed: int, calibrated_reference_s: float) -> Turn:
    cost_model = engine.core.scheduler.cost_model
    assert isinstance(cost_model, OnlineCostModel)
    watched = Watched(cost_model.base)
    engine.core.subscribe(watched)
    before_s = reference_s(engine)
    ids = engine.ask(random_prompts(LINES, PROMPT_TOKENS, vocab_size(model), seed=seed), NEW_TOKENS)
    engine.run_for(min(WARM_UP_S, seconds))
    watched.is_on = True
    engine.run_for(seconds)
    watched.is_on = False
    engine.abort(ids)
    speed = 2.0 * calibrated_reference_s / (before_s + reference_s(engine))
    predicted_s = watched.total_s - watched.executed_s + watched.predicted_s / speed
    step_ms, tokens_per_s = 1e3 * watched.total_s / watched.steps, watched.tokens / watched.total_s
    return Turn(step_ms, tokens_per_s, speed, watched.total_s / predicted_s - 1.0)


def summary(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Medians, and the two questions."""
    rows = {
        name: {field: statistics.median(getattr(each, field) for each in found) for field in Turn.__annotations__}
        for name, found in turns.items()
    }
    best = max(row["tokens_per_s"] for name, row in rows.items() if name != FREE)
    return {
        "lengths": rows,
        "is_close": {name: abs(row["error"]) <= CLOSE for name, row in rows.items()},
        "free_over_best": rows[FREE]["tokens_per_s"] / best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths-ms", type=float, nargs="+", default=[39.0, 100.0, 350.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="measured time of a turn (20)")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true", help="the embedded model, one turn of a second each")
    args = parser.parse_args()
    model = EMBEDDED if args.smoke else model_111m()
    if args.smoke:
        args.turns, args.seconds = 1, 1.0
    found = {"machine": machine(), "model": model.name, "threads": args.threads}
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory) / "measured.json"
        report, subject = calibrate_model(str(model), FULL, device="cpu", dtype=args.dtype, num_threads=args.threads)
        save_profile(report.profile(subject, "measured", "2000-01-01", ""), profile)
        calibrated_reference_s = statistics.median(report.measurements.reference_s)
        lengths_s = {FREE: None} | {f"{length:g} ms": length / 1e3 for length in args.lengths_ms}
        engines = {
            name: engine_of(model, profile, length_s, args.threads, args.dtype) for name, length_s in lengths_s.items()
        }
        turns: dict[str, list[Turn]] = {name: [] for name in engines}
        for number in range(args.turns):
            for place in range(len(engines)):  # each has every place in turn
                name = list(engines)[(place + number) % len(engines)]
                seed = number * len(engines) + place
                turns[name].append(turn(engines[name], model, args.seconds, seed, calibrated_reference_s))
        dtype = engines[FREE].ready.dtype
        for engine in engines.values():
            engine.close()
    found |= {"dtype": dtype} | summary(turns)
    rows = [
        [name, *(round(row[field], 2) for field in ("step_ms", "tokens_per_s", "speed")), f"{row['error']:+.1%}"]
        for name, row in found["lengths"].items()
    ]
    print_table(
        f"{model.name}, {dtype}: offline work alone",
        ["length", "step ms", "tokens/s", "machine's speed", "predicted"],
        rows,
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()

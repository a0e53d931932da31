"""A pool run to its end in the simulator, in an order that was planned before."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.offline.planning.plan import PromptPool
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.estimator.recipes import DEFAULT_HEADROOM
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate

NOTHING_KEPT = "fixed@0"
FOR_EVER_S = 1e9
"""End of the window: a run ends when its work does."""
SEATS = 256
"""vLLM's cap on requests that run at once."""
USED_MEMORY = 0.9
"""Fraction of the memory that the expected answers may fill: lengths and ages differ from the mean."""


@dataclass(slots=True, frozen=True)
class Engine:
    """The scheduler and its limits; 256 slots and 2,048 tokens per step are vLLM's."""

    policy: str = "fcfs"
    seats: int = SEATS
    step_tokens: int = 2048
    has_all_memory: bool = False
    """Nothing is reserved for online work, of which there is none. A policy with a reservation drops rows when all
    slots together fill the memory."""


def slots_by_memory(pool: PromptPool) -> int:
    """Number of requests that fit into memory with their answers, prefixes held once (no other cap: BatchLLM, section
    4.3)."""
    held_tokens = pool.work.prompt_tokens.sum() - pool.shared_tokens.sum() + pool.work.output_tokens.sum()
    return max(int(USED_MEMORY * pool.kv_tokens * len(pool.shared_tokens) / held_tokens), 1)


@dataclass(slots=True, frozen=True)
class Outcome:
    """Figures of a whole run."""

    seconds: float
    requests_per_s: float
    tokens_per_s: float
    """Prompts and answers, cached tokens as well."""
    saving: float
    """Fraction of all prompt tokens that was not computed."""
    share_of_bound: float
    """Fraction of the rate that the roofline alone would allow (``simulation/bound.py``, the long run)."""
    step_tokens: FloatArray
    """[steps] computed in each."""


def run_to_the_end(
    name: str,
    requests: Sequence[TraceRequest],
    rows: IntArray,
    profile: DeviceProfile,
    engine: Engine,
    overlap_kappa: float = 1.0,
) -> Outcome:
    """Runs the rows in a given order. Under ``fcfs`` the engine admits them in exactly this order, as memory and slots
    allow."""
    scenario = Scenario(
        headroom=NOTHING_KEPT if engine.has_all_memory else DEFAULT_HEADROOM,
        offline_max_kv_ratio=1.0 if engine.has_all_memory else SchedulerConfig().offline_max_kv_ratio,
        profile=profile,
        offline=[OfflineSet(name, [requests[row] for row in rows.tolist()], synthetic=True)],
        policy=engine.policy,
        overlap_kappa=overlap_kappa,
        refill=False,
        window_s=(0.0, FOR_EVER_S),
        max_num_seqs=engine.seats,
        max_num_batched_tokens=engine.step_tokens,
    )
    run = simulate(scenario)
    steps = run.measures.steps((-math.inf, math.inf))
    seconds = float(steps["end_s"].max())
    prompt_tokens = float(steps["prompt_tokens"].sum())
    tokens_per_s = (prompt_tokens + float(steps["output_tokens"].sum())) / seconds
    bound = run.result.offline.bound_tokens_per_s["long_run"]
    return Outcome(
        seconds,
        len(rows) / seconds,
        tokens_per_s,
        1.0 - float(steps["prefill_tokens"].sum()) / prompt_tokens,
        tokens_per_s / bound if bound else 0.0,
        steps["computed_tokens"],
    )

"""A blended pool run to its end under several policies, and what its steps were made of."""

import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from neaptide.engine.arrays import FloatArray
from neaptide.engine.interfaces import Prediction
from neaptide.engine.offline.planning.pooled import DUAL_SCAN
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import Regime, read_kv_tokens
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.cost.step_cost import StepFormula
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.bound import UnitCosts, total_shape
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.blend.pools import Mix, Size, blended, shrunk

OVERLAP_KAPPA = 0.2
SEATS, STEP_TOKENS = 1024, 2048
FOR_EVER_S = 1e9
NOTHING_KEPT = "fixed@0"
"""Headroom where no online work is to come: every policy has the whole memory."""
WAYS: dict[str, tuple[str, str | None]] = {
    "dfs": ("dfs", None),
    "balance": ("balance", None),
    "blendserve": ("blendserve", None),
    "neaptide": ("neaptide", DUAL_SCAN),
}
"""Policy and plan."""


class StepParts:
    """A cost model of the device that notes of every step how long compute and memory are at work in it."""

    def __init__(self, profile: DeviceProfile, overlap_kappa: float) -> None:
        self._model = RooflineModel.from_profile(profile, overlap_kappa)
        self._cost = profile.costs[Regime.MIXED.value]
        self._formula = StepFormula(self._cost, tile_tokens=profile.tile_tokens)
        self._parts = array("d")

    def predict(self, shape: BatchShape) -> Prediction:
        """Asked once for each step, by the executor."""
        cost, rows = self._cost, shape.prefill_requests + shape.decode_requests
        compute_s = self._formula.gemm_s(shape.num_tokens) + cost.row_s * rows
        compute_s += cost.pair_s * shape.prefill_attention_pairs
        prediction = self._model.predict(shape)
        self._parts.extend((compute_s, cost.weights_s + cost.kv_token_s * read_kv_tokens(shape), prediction.seconds))
        return prediction

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learns nothing."""

    @property
    def table(self) -> FloatArray:
        """[steps, 3] seconds of compute, of memory, and of the step."""
        return np.array(self._parts).reshape(-1, 3)


@dataclass(frozen=True)
class Ran:
    """A pool that was run to its end."""

    seconds: float
    sharing: float
    """Fraction of the prompt tokens found in the cache; tokens lost by preemptions do not count (section 6.4)."""
    again: float
    """Tokens computed once more after a preemption, of all that were computed."""
    steps: FloatArray
    """[steps, 3] seconds of compute, of memory, and of the step."""

    @cached_property
    def overlapped(self) -> float:
        """Overlap: fraction of the smaller of total compute and memory time that ran in parallel with the other; 1 if
        every step had the mix of the whole."""
        compute_s, memory_s, _ = self.steps.T
        return float(np.minimum(compute_s, memory_s).sum() / min(compute_s.sum(), memory_s.sum()))

    @property
    def compute_bound(self) -> float:
        """Share of the time in steps that compute longer than they read."""
        compute_s, memory_s, seconds = self.steps.T
        return float(seconds[compute_s > memory_s].sum() / seconds.sum())


@dataclass(frozen=True)
class BlendCase:
    """A pool on a device, both shrunk by the same factor."""

    requests: Sequence[TraceRequest]
    profile: DeviceProfile
    overlap_kappa: float = OVERLAP_KAPPA
    name: str = "blend"

    @classmethod
    def of(cls, mix: Mix, size: Size, profile: DeviceProfile, overlap_kappa: float = OVERLAP_KAPPA) -> "BlendCase":
        set_ = blended(mix, size, profile)
        return cls(set_.requests, shrunk(profile, size.shrink), overlap_kappa, set_.name)

    @cached_property
    def _least(self) -> BatchShape:
        """What has to be done, with every prefix computed once."""
        outputs = [request.output_tokens for request in self.requests]
        return total_shape(self.requests, outputs, self.profile.block_size)

    @cached_property
    def sharing(self) -> float:
        """The most that a cache can find, in whole blocks."""
        prompt_tokens = sum(request.input_tokens for request in self.requests)
        return 1.0 - self._least.prefill_tokens / prompt_tokens

    @cached_property
    def least_steps(self) -> int:
        """As few as memory, the tokens of a step and the longest answer allow."""
        shape = self._least
        longest = max(request.output_tokens for request in self.requests)
        by_memory = shape.decode_context_tokens / self.profile.kv_capacity_tokens
        return math.ceil(max(by_memory, shape.num_tokens / STEP_TOKENS, longest))

    @cached_property
    def optimum_s(self) -> float:
        """The practical optimum: every step has the mix of the whole, and no more of them than must be. What a device
        cannot do without is in it, unlike in the roofline's bound: weights are read in each step, and launches take
        time. The sums are those of ``StepFormula``, for all steps at once."""
        cost, work = self.profile.costs[Regime.MIXED.value], UnitCosts.of(self.profile).work(self._least)
        weights_s = self.least_steps * cost.weights_s
        attention_s = cost.pair_s * self._least.prefill_attention_pairs
        serial_s = max(work.compute_s - attention_s, weights_s) + attention_s + work.memory_s
        overlapped_s = max(work.compute_s, weights_s + work.memory_s)
        blended_s = overlapped_s + self.overlap_kappa * (serial_s - overlapped_s)
        return self.least_steps * cost.fixed_s + work.rest_s + blended_s

    @cached_property
    def roofline_s(self) -> float:
        """Without weights, launches and steps: no policy on no engine is faster."""
        return max(UnitCosts.of(self.profile).work(self._least).lines_s(self.overlap_kappa))

    def ran(self, way: str) -> Ran:
        """As the paper measures: planning takes no time (section 6.1), sampled rows take none of their own."""
        policy, plan = WAYS[way]
        truth = StepParts(self.profile, self.overlap_kappa)
        scenario = Scenario(
            profile=self.profile,
            offline=[OfflineSet(self.name, list(self.requests), synthetic=True)],
            policy=policy,
            plan=plan,
            overlap_kappa=self.overlap_kappa,
            refill=False,
            window_s=(0.0, FOR_EVER_S),
            max_num_seqs=SEATS,
            max_num_batched_tokens=STEP_TOKENS,
            planning_scale=0.0,
            truth=truth,
            headroom=NOTHING_KEPT,
            offline_max_kv_ratio=1.0,
            with_bounds=False,
        )
        steps = simulate(scenario).measures.steps((-math.inf, math.inf))
        prefilled, again = float(steps["prefill_tokens"].sum()), float(steps["again_tokens"].sum())
        sharing = 1.0 - (prefilled - again) / float(steps["prompt_tokens"].sum())
        return Ran(
            float(steps["end_s"].max()),
            sharing,
            again / float(steps["computed_tokens"].sum()),
            truth.table,
        )


Runs = dict[str, dict[str, Ran]]
"""By case, by way."""


def run_all(cases: Mapping[str, BlendCase], ways: Sequence[str], logger: logging.Logger) -> Runs:
    found: Runs = {}
    for name, case in cases.items():
        found[name] = {}
        for way in ways:
            logger.info("%s, %s", name, way)
            found[name][way] = case.ran(way)
    return found

"""W5, the live measure, in the simulator: its load, its targets, and the machine that it was measured on."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import DeviceProfile, PlanningCost
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.online_sets import poisson_arrivals
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.cases.vllm_cpu import requests_at

ONLINE_LENGTHS, OFFLINE_LENGTHS = (128, 32), (256, 64)
OFFLINE_LINES = 3000
TPOT_OVER_ALONE, TTFT_OVER_TPOT = 2.4, 5.0
LAX_S = 3600.0
NUM_LAYERS = 30
STEP_NOISE = 0.08
KV_BYTES = 1 << 30

LIVE_MACHINE = DeviceProfile(
    name="cpu-111m-2026-11-24",
    source="analytic",
    device="2 cores with AVX-512 and bf16 products",
    model="llama-111m",
    dtype="bfloat16",
    date="2026-11-24",
    commit="",
    kv_bytes_per_token=NUM_LAYERS * 3 * 64 * 2 * 2,
    num_blocks=KV_BYTES // (NUM_LAYERS * 3 * 64 * 2 * 2) // 16,
    planning=PlanningCost(1.1e-3, 1.7e-5),
    costs=dict.fromkeys(
        ("prefill", "decode", "mixed"),
        StepCost(
            fixed_s=0.0,
            # For 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96 and 128 tokens, in ms.
            gemm_curve_s=tuple(
                1e-3 * ms for ms in (8.6, 10.0, 10.9, 12.3, 15.5, 18.0, 21.8, 24.1, 28.8, 33.4, 42.7, 52, 75, 97)
            ),
            pair_s=0.0,
            kv_token_s=1e-6,
        ),
    ),
)
"""By hand from the log of 2026-11-24: steps of one to nine streams as measured (9 to 20 ms), of 64 requests 71 ms, a
prompt of 128 tokens 95 to 104 ms, 1.1 ms outside of the model for one request and 2.2 for 64."""


@dataclass(slots=True, frozen=True)
class Size:
    """How long a run is, what of it is measured, and how often it is repeated."""

    loads: tuple[float, ...] = (0.1, 0.2, 0.4)
    duration_s: float = 300.0
    window_s: tuple[float, float] = (20.0, 290.0)
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(slots=True, frozen=True)
class Bench:
    """The machine with its ceiling: the load is a share of that."""

    profile: DeviceProfile
    size: Size
    ceiling_tokens_per_s: float

    @classmethod
    def of(cls, profile: DeviceProfile, size: Size) -> "Bench":
        """Simulates the ceiling: offline work alone, without targets."""
        lax = _scenario(profile, size, size.seeds[0])
        return cls(profile, size, simulate(replace(lax, offline=[_lines()])).result.offline_tokens_per_s)

    def alone(self, load: float, seed: int) -> Scenario:
        """The chats of one repeat by themselves, without targets."""
        rate_rps = load * self.ceiling_tokens_per_s / sum(ONLINE_LENGTHS)
        arrivals_s = poisson_arrivals(np.random.default_rng(seed), np.full(1, rate_rps), self.size.duration_s)
        online = requests_at("w5-online", arrivals_s, ONLINE_LENGTHS)
        return replace(_scenario(self.profile, self.size, seed), online=online)

    def beside(self, load: float, seed: int, tpot_slo_s: float) -> Scenario:
        """The same scenario with the batch and targets."""
        return replace(
            self.alone(load, seed),
            offline=[_lines()],
            tpot_slo_s=tpot_slo_s,
            ttft_slo_s=TTFT_OVER_TPOT * tpot_slo_s,
        )

    def tpot_slo_s(self, load: float) -> float:
        """From a probe of online alone, as the live run has it."""
        return TPOT_OVER_ALONE * middle(
            simulate(self.alone(load, seed)).result.online.tpot_s["p50"] for seed in self.size.seeds
        )


def middle(values: Iterable[float | None]) -> float:
    """The median; what is not known counts as not a number."""
    return median(float("nan") if value is None else value for value in values)


def figures_of(results: Iterable[SimResult]) -> dict[str, float]:
    """Medians over the repeats."""
    ran = list(results)
    return {
        "ttft_p50_ms": 1e3 * middle(one.online.ttft_s["p50"] for one in ran),
        "ttft_p99_ms": 1e3 * middle(one.online.ttft_s["p99"] for one in ran),
        "tpot_p50_ms": 1e3 * middle(one.online.tpot_s["p50"] for one in ran),
        "attained_percent": 100 * middle(one.attained for one in ran),
        "offline_tokens_per_s": middle(one.offline_tokens_per_s for one in ran),
    }


def _scenario(profile: DeviceProfile, size: Size, seed: int) -> Scenario:
    return Scenario(
        profile=profile,
        ttft_slo_s=LAX_S,
        tpot_slo_s=LAX_S,
        window_s=size.window_s,
        step_noise=STEP_NOISE,
        seed=seed,
        block_size=profile.block_size,
        max_model_len=1024,
        drain_s=60.0,
        with_bounds=False,
    )


def _lines() -> OfflineSet:
    return OfflineSet("w5", requests_at("w5#0", [0.0] * OFFLINE_LINES, OFFLINE_LENGTHS), synthetic=True)

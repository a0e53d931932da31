"""Small scenes for the simulator: a profile made up for tests, traces by hand, and the scene of the golden log."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.estimator.cost.step_cost import StepCost
from neaptide.estimator.device_profile import DeviceProfile, PlanningCost
from neaptide.estimator.recipes import roofline_recipe
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest, content_base
from neaptide.simulation.scenario import Scenario

STEP_S = 0.1
BASE = content_base("scene#0")

COST = StepCost(
    fixed_s=4e-3, gemm_curve_s=(1e-4, 2e-4), pair_s=1e-7, kv_token_s=1e-6, decode_request_s=1e-4, prefill_request_s=2e-4
)
PLANS_AT_ONCE = PlanningCost()


def profile(num_blocks: int = 64, block_size: int = 4, planning: PlanningCost = PLANS_AT_ONCE) -> DeviceProfile:
    return DeviceProfile(
        name="scene",
        source="analytic",
        device="none",
        model="none",
        dtype="none",
        date="2026-01-01",
        commit="",
        kv_bytes_per_token=1,
        num_blocks=num_blocks,
        block_size=block_size,
        planning=planning,
        costs=dict.fromkeys(("prefill", "decode", "mixed"), COST),
    )


def online(*requests: tuple[float, int, int]) -> list[TraceRequest]:
    """Requests of (arrival, prompt tokens, output tokens) that share nothing."""
    return [
        TraceRequest(arrival_s, ((1000 + k, tokens),), outputs)
        for k, (arrival_s, tokens, outputs) in enumerate(requests)
    ]


def offline(*requests: tuple[int, int, int], batch_size: int | None = None) -> OfflineSet:
    """Rows of (shared tokens, own tokens, output tokens); the shared ones are the same text."""
    rows = [
        TraceRequest(0.0, ((BASE, shared), (BASE + 2 + k, own)) if shared else ((BASE + 2 + k, own),), outputs)
        for k, (shared, own, outputs) in enumerate(requests)
    ]
    return OfflineSet("scene", rows, synthetic=True, batch_size=batch_size)


def constant(
    online_requests: Sequence[TraceRequest] = (), offline_sets: Sequence[OfflineSet] = (), **fields: object
) -> Scenario:
    """Every step takes ``STEP_S``, and the scheduler knows it. Roomy targets unless given."""
    values: dict[str, object] = {
        "profile": profile(),
        "online": online_requests,
        "offline": offline_sets,
        "block_size": 4,
        "ttft_slo_s": 10.0,
        "tpot_slo_s": 10.0,
        "truth": ConstantCostModel(STEP_S),
        "cost_model": {"kind": "constant", "seconds": STEP_S},
        "keep_order": True,
    }
    return Scenario(**(values | fields))  # type: ignore[arg-type]


def mixed(seed: int = 7, num_online: int = 24, num_rows: int = 40, **fields: object) -> Scenario:
    """Bursts of online requests beside offline rows on two shared prefixes, in a pool that is too small for both.

    Floats in plain Python only, so that its step log has the same bytes on every machine.
    """
    rng = Random(seed)
    arrivals = sorted(rng.choice([0.0, 0.3, 0.6, 0.9]) + 0.05 * rng.random() for _ in range(num_online))
    requests = online(*((a, rng.randrange(4, 60), rng.randrange(1, 14)) for a in arrivals))
    rows = [
        TraceRequest(0.0, ((BASE + k % 2, 24), (BASE + 2 + k, rng.randrange(1, 20))), rng.randrange(1, 24))
        for k in range(num_rows)
    ]
    shape = profile(num_blocks=48)
    scenario = Scenario(
        profile=shape,
        online=requests,
        offline=[OfflineSet("scene", rows, synthetic=True)],
        block_size=4,
        ttft_slo_s=0.15,
        tpot_slo_s=0.02,
        max_num_seqs=16,
        max_num_batched_tokens=96,
        cost_model=roofline_recipe(shape, 1.0, learns=False),
        headroom="fixed",
        keep_order=True,
        seed=seed,
    )
    return replace(scenario, **fields)  # type: ignore[arg-type]

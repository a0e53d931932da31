"""BROS on the load of its own paper (section 7.1): OPT-13B on two A100, ShareGPT lengths at 5 requests/s."""

import logging

from neaptide.estimator.device_profile import load_profile
from neaptide.experiments.result import Row
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate

PROFILE = "a100-40g-sxm-opt-13b-tp2"
ONLINE, OFFLINE = "bros-rt-sharegpt@5", "bros-be"
POLICIES = ("bros", "round-robin", "fcfs-v0")
TTFT_SLO_S, TPOT_SLO_S = 0.4, 0.2
CONTEXT_TOKENS = 2048
"""Of OPT."""


def run_bros_load(seed: int, seconds: float) -> dict[str, SimResult]:
    """The policies of the paper's comparison on the first so many ``seconds`` of its ten minutes, drawn by ``seed``.

    Raises what ``simulate`` raises.
    """
    results = {}
    for policy in POLICIES:
        logging.getLogger(__name__).info("policy %s on the load of BROS", policy)
        scenario = Scenario(
            profile=load_profile(PROFILE),
            online=online_requests(ONLINE, seed, window_s=(0.0, seconds)),
            offline=[load_offline(OFFLINE, seed)],
            policy=policy,
            ttft_slo_s=TTFT_SLO_S,
            tpot_slo_s=TPOT_SLO_S,
            max_model_len=CONTEXT_TOKENS,
            seed=seed,
        )
        results[policy] = simulate(scenario).result
    return results


def bros_rows(results: dict[str, SimResult]) -> list[Row]:
    """Attainment of both targets, and how ``bros`` stands to the others in offline tokens/s."""
    offline = {policy: result.offline.tokens_per_s or 0.0 for policy, result in results.items()}
    rows = [
        Row(
            f"load of BROS, {policy}: attainment", 100.0 * (result.online.attainment["both"] or 0.0), unit="%", digits=1
        )
        for policy, result in results.items()
    ]
    for other in POLICIES[1:]:
        change = 100.0 * (offline["bros"] / offline[other] - 1.0)
        rows.append(Row(f"load of BROS: offline against {other}", change, unit="%", digits=1))
    return rows

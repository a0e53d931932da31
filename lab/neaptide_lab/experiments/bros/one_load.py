"""One load of the BROS set-up: OPT-13B on two A100, ShareGPT lengths at 5 requests/s."""

import logging
from dataclasses import replace

from neaptide.simulation.result import SimResult
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.bros.setting import BROS, OPT_13B, ROUND_ROBIN, VLLM_V0, Cell, scenario
from neaptide_lab.experiments.result import Row

LOAD = Cell(OPT_13B, "ShareGPT", 5.0)
POLICIES = (BROS, ROUND_ROBIN, VLLM_V0)


def run_bros_load(seed: int, seconds: float) -> dict[str, SimResult]:
    """The policies of the paper's comparison on the first ``seconds`` of its ten minutes, drawn by ``seed``. Raises
    what ``simulate`` raises."""
    results = {}
    for policy in POLICIES:
        logging.getLogger(__name__).info("policy %s on the load of BROS", policy)
        given = replace(scenario(LOAD, seconds, seed=seed), policy=policy)
        results[policy] = simulate(given).result
    return results


def bros_rows(results: dict[str, SimResult]) -> list[Row]:
    """Attainment of both targets, and how ``bros`` stands to the others in offline tokens/s."""
    offline = {policy: result.offline_tokens_per_s for policy, result in results.items()}
    rows = [
        Row(f"load of BROS, {policy}: attainment", 100.0 * result.attained, unit="%", digits=1)
        for policy, result in results.items()
    ]
    for other in POLICIES[1:]:
        change = 100.0 * (offline[BROS] / offline[other] - 1.0)
        rows.append(Row(f"load of BROS: offline against {other}", change, unit="%", digits=1))
    return rows

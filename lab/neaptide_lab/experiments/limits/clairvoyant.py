"""Attainment of policies beside what no policy can exceed, on online loads alone, at and above capacity."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.simulation.bound import bound_tokens_per_s
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.limits.attainment import attainment_bound
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "clairvoyant"
ABOUT = "attainment of neaptide and of qoserve beside what no policy can exceed, at and above capacity"

A100, H100 = "a100-40g-llama-3.1-8b", "h100-80g-llama-3.1-8b"
POLICIES = ("neaptide", "neaptide_lab.policies.qoserve:QoServePaced")
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.05
CLIENT_LIMIT_TOKENS = 1024
OFFLINE, OFFLINE_REQUESTS = "sharegpt_lengths", 500
"""Offline work beside which the bound on its tokens per second is computed."""


@dataclass(slots=True, frozen=True)
class Case:
    trace: str
    window_s: tuple[float, float]
    """Window in trace time."""
    profile: str
    speeds: tuple[float, ...]
    context_tokens: int = 16_384


FULL = (
    Case("azure_code_2023", (0.0, 300.0), A100, (0.25, 0.5, 1.0)),
    Case("azure_code_2023", (600.0, 900.0), H100, (1.0, 2.0)),
    Case("azure_conv_2023", (0.0, 200.0), A100, (1.0, 2.0, 3.0)),
    Case("azure_conv_2023", (600.0, 840.0), H100, (1.2, 3.0)),
    Case("mooncake_conversation", (600.0, 680.0), H100, (0.4, 0.8), 131_072),
    Case("mooncake_synthetic", (0.0, 200.0), H100, (0.5, 1.0), 131_072),
    Case("agent_miniswe", (0.0, 200.0), H100, (1.0,), 131_072),
    Case("servegen_r1_resampled", (600.0, 920.0), H100, (1.6, 6.0)),
)
QUICK = (Case("azure_code_2023", (0.0, 60.0), A100, (0.5, 1.0)), Case("azure_conv_2023", (0.0, 20.0), A100, (2.0,)))


def run(quick: bool) -> ExperimentResult:
    return run_cases(QUICK if quick else FULL)


def run_cases(cases: Sequence[Case]) -> ExperimentResult:
    rows, data = [], {}
    for case in cases:
        for speed in case.speeds:
            name = f"{case.trace} at {speed:g}x, {case.profile.partition('-')[0]}"
            logging.getLogger(__name__).info("%s", name)
            scenario = scenario_of(case, speed)
            bound = attainment_bound(scenario)
            assert bound is not None
            attained = {policy: simulate(replace(scenario, policy=policy)).result.attained for policy in POLICIES}
            rows += [
                Row(f"{name}: {policy.rpartition(':')[2]}", 100 * one, 100 * bound, "%", 1, holds=one <= bound)
                for policy, one in attained.items()
            ]
            data[name] = {
                "requests": len(scenario.online),
                "bound": bound,
                "attained": attained,
                "offline_tokens_per_s": offline_bound(scenario) if bound == 1.0 else None,
            }
    notes = [
        "The bound knows all arrivals and lengths. It counts no fixed cost of a step, no memory and no planning time, "
        "and it finds every shared prefix cached (lab/neaptide_lab/experiments/limits/attainment.py).",
        f"Online alone, no noise, TTFT {TTFT_SLO_S:g} s, TPOT {1e3 * TPOT_SLO_S:g} ms, max_tokens "
        f"{CLIENT_LIMIT_TOKENS:,}, 2,048 step tokens, 256 seats.",
        f"data.offline_tokens_per_s is the bound on {OFFLINE} beside the load where all requests may be in time.",
    ]
    return ExperimentResult(NAME, rows, notes, {"cases": data}, against="clairvoyant")


def scenario_of(case: Case, speed: float) -> Scenario:
    """The online load alone."""
    return Scenario(
        profile=load_profile(case.profile),
        online=online_requests(case.trace, window_s=case.window_s, speed=speed),
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        max_model_len=case.context_tokens,
        max_output_tokens=CLIENT_LIMIT_TOKENS,
        drain_s=TTFT_SLO_S + CLIENT_LIMIT_TOKENS * TPOT_SLO_S,
    )


def offline_bound(scenario: Scenario) -> float | None:
    """Most offline tokens per second beside all of the online load, in the long run."""
    beside = replace(scenario, offline=[load_offline(OFFLINE, seed=0, limit=OFFLINE_REQUESTS)])
    window_s = (scenario.online[0].arrival_s, scenario.online[-1].arrival_s)
    return bound_tokens_per_s(beside, window_s)["long_run"]

"""The planner's answers on recorded traces, checked with simulations that are put together here."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from neaptide.cluster.capacity.planner import Question, plan
from neaptide.cluster.capacity.result import Peak
from neaptide.cluster.simulation.cluster import simulate_cluster
from neaptide.cluster.simulation.fleet import SimulatedFleet
from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.scenario import Scenario

PEAK_S, MARGIN_S = 30.0, 10.0
TARGET = 0.9
ROUNDING_S = 1e-6


def attained(scenario: Scenario, trace: Sequence[TraceRequest], peak: Peak, replicas: int) -> float:
    """Share of the peak's requests that meet both targets, on so many replicas behind a router."""
    start_s, end_s = peak.start_s - MARGIN_S, peak.start_s + PEAK_S + MARGIN_S
    near = [replace(r, arrival_s=r.arrival_s - start_s) for r in trace if start_s <= r.arrival_s <= end_s]
    met = []
    run = simulate_cluster(replace(scenario, online=near), SimulatedFleet(replicas=replicas)).whole
    for record in run.measures.online.values():
        if MARGIN_S - ROUNDING_S <= record.arrival_s <= MARGIN_S + PEAK_S + ROUNDING_S:
            in_time = record.is_done and record.first_s - record.arrival_s <= scenario.ttft_slo_s
            met.append(in_time and (record.tpot_s or 0.0) <= scenario.tpot_slo_s)
    assert len(met) == peak.requests
    return sum(met) / len(met)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "profile_name", "speed"),
    [("azure_conv_2023", "a100-80g-llama-3.1-8b", 2.0), ("azure_code_2023", "h100-80g-llama-3.1-8b", 1.0)],
)
def test_one_replica_less_misses_the_targets_of_the_peak_and_the_answer_keeps_them(
    name: str, profile_name: str, speed: float
) -> None:
    scenario, trace = Scenario(profile=load_profile(profile_name)), online_requests(name, speed=speed)
    found = plan(Question(base=scenario, trace=trace, attainment=TARGET, peak_s=PEAK_S, margin_s=MARGIN_S))
    assert found.answer is not None
    assert found.answer.replicas > 1
    shares = {n: attained(scenario, trace, found.peak, n) for n in (found.answer.replicas, found.answer.replicas - 1)}
    assert shares[found.answer.replicas] >= TARGET > shares[found.answer.replicas - 1]
    planned = {point.replicas: point.attainment["both"] for point in found.tried}
    assert shares.items() <= planned.items()

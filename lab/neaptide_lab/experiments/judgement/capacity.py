"""Measures the capacities of the design's devices: requests per second of each trace, without targets.

The requests of the calibration window all come at once and are served in their order, then once more with as many
others behind them. The second takes longer by the time of those others, in which the device is full: its fill and its
last answers, which are in both, cancel.
"""

import json
import sys
from dataclasses import replace

from neaptide.estimator.device_profile import load_profile
from neaptide.loadgen.workloads.traces import TraceRequest, salted
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.judgement.cell import Cell, online_of
from neaptide_lab.experiments.judgement.design import (
    CAPACITIES,
    CONTEXT_TOKENS,
    DEVICES,
    TRACES,
    limit_tokens,
    part_of,
)

POLICY = "fcfs"
LAX_S = 1e6


def capacity_rps(trace: str, device: str) -> float:
    cell = Cell(name="", group="", profile=DEVICES[device], online=(part_of(trace, 1.0, is_report=False),))
    first = [replace(request, arrival_s=0.0) for request in online_of(cell) if request.input_tokens < CONTEXT_TOKENS]
    once_s = _makespan_s(trace, device, first)
    twice_s = _makespan_s(trace, device, [*first, *salted(first, "behind")])
    return len(first) / (twice_s - once_s)


def _makespan_s(trace: str, device: str, requests: list[TraceRequest]) -> float:
    scenario = Scenario(
        profile=load_profile(DEVICES[device]),
        online=requests,
        policy=POLICY,
        ttft_slo_s=LAX_S,
        tpot_slo_s=LAX_S,
        max_model_len=CONTEXT_TOKENS,
        max_output_tokens=limit_tokens(trace),
        drain_s=LAX_S,
        with_bounds=False,
    )
    return max(record.last_s for record in simulate(scenario).measures.online.values())


def main() -> int:
    found: dict[str, dict[str, float]] = {}
    for trace in TRACES:
        found[trace] = {}
        for device in DEVICES:
            found[trace][device] = float(f"{capacity_rps(trace, device):.4g}")
            print(trace, device, found[trace][device], file=sys.stderr, flush=True)
    CAPACITIES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

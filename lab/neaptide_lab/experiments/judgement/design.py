"""The design of loads on which our policy may not be below a constant: every pair of levels stands in some cell.

Each trace meets each device at each load once, with one replica. Whether a flood of offline work runs beside it
alternates. Each trace is once on five replicas, with devices, loads and floods in turn.
"""

import json
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from neaptide_lab.experiments.judgement.cell import MADE, Cell, Part

A100, H100 = "a100-40g-llama-3.1-8b", "h100-80g-llama-3.1-8b"
DEVICES = {"A100": A100, "H100": H100}
LOADS = (0.5, 0.8, 1.0, 1.5, 3.0)
"""As multiples of the capacity."""
FIVE = 5
FLOOD = "sharegpt_lengths"
WARM_UP_S = 20.0
LEAST_REQUESTS, MOST_REQUESTS, LEAST_WINDOW_S = 300, 900, 30.0
"""A window of one replica has the requests of the shortest time, but not fewer and not more than these. That of several
has the fewest for each."""
CONTEXT_TOKENS = 32_768
LIMIT_TOKENS = 1024
LONG_LIMIT_TOKENS = 4096
"""``max_tokens`` of answers of reasoning models."""
CAPACITIES = Path(__file__).with_name("capacities.json")


@dataclass(slots=True, frozen=True)
class Recorded:
    """Windows of a recorded trace, in its own seconds."""

    calibration_s: tuple[float, float]
    report_s: tuple[float, float]
    by_layers: bool = False
    """Whether a higher load is more of the same at once, where gaps between requests may not be shortened."""


RECORDED = {
    "azure_code_2023": Recorded((260.0, 345.0), (1280.0, 1375.0)),
    "azure_conv_2023": Recorded((200.0, 255.0), (900.0, 965.0)),
    "mooncake_conversation": Recorded((600.0, 695.0), (1500.0, 1590.0)),
    "mooncake_synthetic": Recorded((100.0, 195.0), (400.0, 490.0)),
    "agent_miniswe": Recorded((10.0, 35.0), (55.0, 85.0), by_layers=True),
    "servegen_r1_resampled": Recorded((600.0, 800.0), (2000.0, 2100.0)),
}
TRACES = (*RECORDED, *MADE)


@cache
def capacities_rps() -> dict[str, dict[str, float]]:
    """Measured requests per second that a device serves without targets, by trace and device."""
    found: dict[str, dict[str, float]] = json.loads(CAPACITIES.read_text(encoding="utf-8"))
    return found


def limit_tokens(trace: str) -> int:
    return LONG_LIMIT_TOKENS if trace in ("servegen_r1_resampled", "made-reasoning") else LIMIT_TOKENS


def part_of(trace: str, rate_rps: float, replicas: int = 1, *, is_report: bool) -> Part:
    """The trace's window at a rate for each replica."""
    num_requests = min(max(LEAST_WINDOW_S * rate_rps, LEAST_REQUESTS), MOST_REQUESTS)
    if replicas > 1:
        num_requests, rate_rps = replicas * LEAST_REQUESTS, replicas * rate_rps
    if trace in MADE:
        return Part(trace, (0.0, num_requests / rate_rps), rate_rps=rate_rps)
    one = RECORDED[trace]
    window_s = one.report_s if is_report else one.calibration_s
    own_rps, length_s = recorded_rps(trace, window_s), window_s[1] - window_s[0]
    if one.by_layers:
        layers = max(round(rate_rps / own_rps), 1)
        return Part(trace, window_s, rate_rps / own_rps / layers, layers=layers)
    return Part(trace, window_s, rate_rps / own_rps, copies=max(round(num_requests / own_rps / length_s), 1))


@cache
def recorded_rps(trace: str, window_s: tuple[float, float]) -> float:
    """Requests per second of the trace's window."""
    from neaptide.loadgen.workloads.online_sets import online_requests

    requests = online_requests(trace, window_s=window_s, max_input_tokens=CONTEXT_TOKENS - 1)
    return len(requests) / (window_s[1] - window_s[0])


def cells(*, is_report: bool) -> list[Cell]:
    """The design, from the measured capacities."""
    found = []
    for (at, trace), (number, device), (step, load) in product(enumerate(TRACES), enumerate(DEVICES), enumerate(LOADS)):
        is_beside = (at + number + step) % 2 == 1
        found.append(_cell(trace, device, load, 1, is_beside=is_beside, is_report=is_report))
    devices = tuple(DEVICES)
    for at, trace in enumerate(TRACES):
        device, load = devices[at % len(devices)], LOADS[at % len(LOADS)]
        found.append(_cell(trace, device, load, FIVE, is_beside=at // 2 % 2 == 1, is_report=is_report))
    return found


def _cell(trace: str, device: str, load: float, replicas: int, *, is_beside: bool, is_report: bool) -> Cell:
    rate_rps = load * capacities_rps()[trace][device]
    where = "beside" if is_beside else "alone"
    return Cell(
        name=f"constant {trace} {replicas} {device} {load:g}x {where}",
        group="constant",
        case=trace,
        profile=DEVICES[device],
        online=(part_of(trace, rate_rps, replicas, is_report=is_report),),
        offline=FLOOD if is_beside else "",
        replicas=replicas,
        warm_up_s=WARM_UP_S if is_beside else 0.0,
        context_tokens=CONTEXT_TOKENS,
        limit_tokens=limit_tokens(trace),
        seed=100 if is_report else 0,
    )

"""Upper bounds of a cell, as the figures of a run: most requests in time, most offline work.

Offline work is bounded beside all of the online requests: where not all can be in time, nothing is said of it.
"""

import sys
import time
from dataclasses import replace

import msgspec

from neaptide.simulation.bound import Devices, bound_tokens_per_s
from neaptide.simulation.simulator import fitting_online
from neaptide_lab.experiments.judgement.cell import Cell, scenario_of
from neaptide_lab.experiments.judgement.worker import Figures, Task
from neaptide_lab.experiments.limits.attainment import attainment_bound

ANY_POLICY = "neaptide"


def has_bound(cell: Cell) -> bool:
    """Whether the cell's step times are those of its profile."""
    return cell.truth == 1.0 and not cell.stall_steps


def bound_of(cell: Cell) -> Figures:
    started_s = time.perf_counter()
    scenario = replace(scenario_of(cell, ANY_POLICY)[0], with_bounds=True)
    online = fitting_online(scenario)
    window_s = scenario.window_s or (online[0].arrival_s, online[-1].arrival_s)
    devices = Devices(float(cell.replicas), cell.replicas)
    attained, offline = attainment_bound(scenario, cell.replicas), None
    if cell.offline and attained == 1.0:
        offline = bound_tokens_per_s(scenario, window_s, devices)["long_run"]
    nothing = {field.name: None for field in msgspec.structs.fields(Figures)}
    known = {
        "requests": sum(window_s[0] <= request.arrival_s <= window_s[1] for request in online),
        "attained": attained,
        "offline_tokens_per_s": offline or 0.0,
        "again_tokens": 0,
        "preempted_online": 0,
        "preempted_offline": 0,
        "steps": 0,
        "valid": True,
        "failed": 0,
        "wall_s": time.perf_counter() - started_s,
    }
    return msgspec.convert(nothing | known, Figures)


def main() -> int:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(bound_of(task.cell)) + b"\n")
    return 0

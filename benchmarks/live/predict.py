"""Simulates a live run: the same arrivals on a virtual clock, compared with the clients' measurements.

Everything comes from the run's own step log. First the log is replayed. Today's scheduler must decide every step in the
same way, and the replay gives the shapes of the steps. Then the load is simulated twice. The first simulation uses the
step times that the engine's cost model had learned when the measurement window began. The second uses those of the
whole run, which separates the drift of the machine from the simulator's own error.

The simulation ends at the engine. A client also waits until its request has been read, and after the step that made its
first token. Both times are measured on the run's own requests, and their medians are added. The first simulation uses
the requests before the window, the second all of them.

    python -m benchmarks.live.predict KEPT/load-0.2-seed-0-beside [...]    # a run that was kept with ``--keep``

``share`` depends on the machine's speed in two runs, because the limited ceiling is a run of its own. So that ceiling
is also simulated on the machine of this run. What is missing to it is due to the scheduler.
"""

import argparse
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from benchmarks.common import FIRST_TOKEN_ID, print_table, random_prompts
from benchmarks.live import late
from benchmarks.live.findings import jsonable
from benchmarks.live.plan import ONLINE_IN, Targets, Window
from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel
from neaptide.engine.messages import StepOutputs
from neaptide.engine.observer import EngineObserver
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.record.step_log import AddLine, BatchLine, HeaderLine, ObserveLine, StepLine, read_log
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import regime_of
from neaptide.estimator.cost.online_fit import OnlineCostModel
from neaptide.estimator.recipes import build_cost_model, build_headroom
from neaptide.executors.simulated.trace_executor import Layers, StepTally, TraceExecutor
from neaptide.loadgen.client.recorder import ChatRecord, attainment
from neaptide.loadgen.percentiles import percentiles
from neaptide.simulation.driven_runs import (
    DRAWS,
    ERRORS,
    NEVER,
    DrivenLoad,
    DrivenStep,
    MachineModel,
    Outcome,
    Shapes,
    drive,
)
from neaptide.simulation.measures import Measures, OnlineRecord
from neaptide.simulation.replay import replay

MAX_HOST_S = 0.05
"""Longest gap between two steps that counts as host time; in a longer one there was nothing to do."""
VOCABULARY = 1000
GIVE_UP_PIECES = 30 * 9
"""Number of pieces between which a step may be aborted: the kernels of the 111M model's layers."""
AFTER_IDLE = "after_idle"
CAPPED_DRAWS = 3
"""Draws of a whole run's steps; fewer, because no measure depends on a single step."""
OF_MACHINE = ("step_error", "step_noise", "way_to_engine_ms", "way_to_client_ms")
"""Properties of the machine, shown with the figures."""
ERROR_OF = {
    "ttft_p50_ms": ERRORS["p50"],
    "ttft_p99_ms": ERRORS["p99"],
    "tpot_p50_ms": ERRORS["p50"],
    "tpot_p99_ms": ERRORS["p99"],
    "offline_tokens_per_s": ERRORS["tokens/s"],
    "online_tokens_per_s": ERRORS["tokens/s"],
}
"""Largest relative errors of a prediction."""
Figures = dict[str, float]


class Way(NamedTuple):
    """Time of a request through client, network and API process; medians."""

    to_engine_s: float
    """From its due time until the server had received it, from when the engine counts."""
    to_client_s: float
    """From the end of the step that made the first token until the client had it."""

    @property
    def seconds(self) -> float:
        return self.to_engine_s + self.to_client_s


class Host(EngineObserver):
    """Lets every plan take a fixed time."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def planning(self, now_s: float) -> None:
        self._clock.sleep_until(self._clock.now() + self._seconds)


@dataclass(slots=True)
class Recorded:
    """Content of the log. Times are in seconds from the batch's arrival."""

    header: HeaderLine
    begin_s: float = 0.0
    """Time of that arrival on the engine's clock."""
    warm_up: list[tuple[BatchShape, float]] = field(default_factory=list)
    """Steps shown to the cost model before the first one."""
    arrivals_s: list[float] = field(default_factory=list)
    served: list[tuple[float, float]] = field(default_factory=list)
    """Arrival and first token of online requests that got one, on the engine's clock, in the order of arrival."""
    rows: int = 0
    row_tokens: int = 0
    steps: list[DrivenStep] = field(default_factory=list)
    difference: str | None = None
    """First difference found by the replay."""
    planned_early_s: list[float] = field(default_factory=list)
    """By step, for an engine one step ahead: the time between the start of the next plan and the earliest end of the
    step in flight."""

    @property
    def host_s(self) -> float:
        """Host time of planning and submitting during a step in flight; the engine reserves both twice."""
        return median(self.planned_early_s) / 2 if self.planned_early_s else 0.0

    def learnt(self, until_s: float) -> tuple[OnlineCostModel, list[DrivenStep]]:
        """The engine's cost model after the steps that had ended by ``until_s``, and these steps."""
        model = build_cost_model(self.header.recipe["cost_model"])
        assert isinstance(model, OnlineCostModel)
        known = [step for step in self.steps if step.end_s <= until_s]
        for shape, seconds in (*self.warm_up, *((step.shape, step.seconds) for step in known)):
            model.observe(shape, seconds)
        return model, known

    def way(self, records: Sequence[ChatRecord]) -> Way:
        """The way of these requests; zero if none got a first token."""
        arrivals_s, ways = [arrival_s for arrival_s, _ in self.served], []
        for record in records:
            index = bisect_left(arrivals_s, record.sent_s)
            if record.token_times_s and index < len(self.served):
                arrival_s, first_s = self.served[index]
                ways.append((arrival_s - record.start_s, record.token_times_s[0] - first_s))
        return Way(*(median(part) for part in zip(*ways, strict=True))) if ways else Way(0.0, 0.0)


def read(log: Path) -> Recorded:
    """Reads and replays a log. Raises ValueError if it is damaged or has no batch."""
    lines = list(read_log(log))
    header = lines[0]
    assert isinstance(header, HeaderLine)
    found = Recorded(header)
    batches = [line for line in lines if isinstance(line, BatchLine)]
    if not batches:
        raise ValueError(f"{log} has no batch")
    found.begin_s = batches[0].now_s
    found.rows, found.row_tokens = sum(len(line.rows) for line in batches), batches[0].rows[0][1]
    found.warm_up = [(BatchShape(*one.shape), one.seconds) for one in lines if isinstance(one, ObserveLine)]
    found.arrivals_s = sorted(line.arrival_s - found.begin_s for line in lines if isinstance(line, AddLine))
    shapes, ended_s, measures = Shapes(), 0.0, Measures()
    earliest_end_s = -math.inf
    for line in lines:
        if isinstance(line, AddLine):
            measures.arrived(line.id, line.arrival_s)

    def take(line: StepLine, outputs: StepOutputs) -> None:
        nonlocal ended_s, earliest_end_s
        start_s, *planned_s, end_s = (at_s - found.begin_s for at_s in line.t)
        planning_s = (planned_s or [start_s])[0] - start_s
        gap_s, begun_s = start_s - ended_s, start_s + planning_s
        host_s = planning_s + (gap_s if 0.0 <= gap_s <= MAX_HOST_S else 0.0)
        if header.scheduler.overlap_depth:  # planned while the step before it ran
            if start_s < ended_s:
                found.planned_early_s.append(max(earliest_end_s - start_s, 0.0))
            begun_s, host_s = max(begun_s, ended_s), 0.0
            earliest_end_s = begun_s + line.predicted[0] - line.predicted[1]
        if not line.given_up:
            found.steps.append(DrivenStep(start_s, end_s - begun_s, host_s, shapes.last))
        ended_s = end_s
        measures.step(outputs, StepTally(), 0, line.t[-1])

    found.difference = replay(log, on_step=take, observers=[shapes]).difference
    found.served = sorted((one.arrival_s, one.first_s) for one in measures.online.values() if one.tokens)
    return found


def predict(log: Path, real: Window, targets: Targets) -> dict[str, Any]:
    """Figures of the real run and of the simulations, by what they know of the step times."""
    recorded = read(log)
    window_s = tuple(at_s - recorded.begin_s for at_s in real.clock_s)
    ways = [recorded.way(records) for records in (real.early, [*real.early, *real.records])]
    before, whole = (
        simulated(recorded, until_s, window_s, targets, way) for until_s, way in zip(window_s, ways, strict=True)
    )
    measured = real_figures(real, targets, recorded)
    capped = capped_tokens_per_s(recorded, window_s, targets)
    left = capped - measured["online_tokens_per_s"]
    return {
        "steps": len(recorded.steps),
        "decided_otherwise": recorded.difference,
        "real": measured,
        "capped_tokens_per_s": round(capped, 1),
        "share_of_it": round(measured["offline_tokens_per_s"] / left, 4) if left > 0.0 else None,
        "known_before": before,
        "known_afterwards": whole,
        "holds": {
            name: holds(measured, figures) for name, figures in (("known_before", before), ("known_afterwards", whole))
        },
    }


def simulated(recorded: Recorded, until_s: float, window_s: Sequence[float], targets: Targets, way: Way) -> Figures:
    """Medians over draws of the steps' scatter."""
    model, known = recorded.learnt(until_s)
    machine = MachineModel(model.as_it_is(), known)
    with TemporaryDirectory() as name:
        load = load_of(recorded, window_s[1], targets, Path(name))
        draws = [figures_of(draw(recorded, load, machine, seed), window_s, targets, way) for seed in range(DRAWS)]
    inside = [step for step in recorded.steps if window_s[0] < step.end_s <= window_s[1]]
    return {name: round(median(one[name] for one in draws), 4) for name in draws[0]} | {
        "step_error": round(machine.error(inside), 4),
        "step_noise": round(machine.noise, 4),
        **{f"of_predicted_{kind}": ratio for kind, ratio in by_kind(machine, inside).items()},
        "way_to_engine_ms": round(1e3 * way.to_engine_s, 2),
        "way_to_client_ms": round(1e3 * way.to_client_s, 2),
    }


def by_kind(machine: CostModel, steps: Sequence[DrivenStep]) -> dict[str, float]:
    """Time of each kind of step, with planning and committing, over its prediction. If a single kind is off, the model
    is wrong; if all are, the machine's speed changed. Kinds without steps are left out."""
    kinds: dict[str, list[DrivenStep]] = {}
    for before, step in zip((None, *steps), steps, strict=False):
        kinds.setdefault(regime_of(step.shape).value, []).append(step)
        if before is not None and step.start_s - before.end_s > MAX_HOST_S:
            kinds.setdefault(AFTER_IDLE, []).append(step)
    return {
        kind: round(
            sum(one.host_s + one.seconds for one in those) / sum(machine.predict(one.shape).seconds for one in those), 4
        )
        for kind, those in sorted(kinds.items())
    }


def load_of(recorded: Recorded, end_s: float, targets: Targets, directory: Path) -> DrivenLoad:
    """A load with the recorded arrivals, and texts of the same lengths that share no prefix."""
    stem = str(directory / "offline")
    with TokenFileWriter(stem) as writer:
        for prompt in random_prompts(recorded.rows, recorded.row_tokens, FIRST_TOKEN_ID + VOCABULARY, seed=1):
            writer.append(prompt)
    prompts = random_prompts(len(recorded.arrivals_s), ONLINE_IN, FIRST_TOKEN_ID + VOCABULARY, seed=2)
    return DrivenLoad(recorded.arrivals_s, prompts, stem, recorded.rows, end_s, targets.ttft_s, targets.tpot_s)


def capped_tokens_per_s(recorded: Recorded, window_s: Sequence[float], targets: Targets) -> float:
    """Rate of offline work alone in steps limited to the TPOT target, on the machine of this run; a median over
    draws."""
    model, known = recorded.learnt(window_s[1])
    machine, cap = MachineModel(model.as_it_is(), known), targets.capping
    scheduler = msgspec.structs.replace(
        recorded.header.scheduler, ttft_slo_s=cap.ttft_s, tpot_slo_s=cap.tpot_s, abortable_steps=False
    )
    with TemporaryDirectory() as name:
        load = replace(load_of(recorded, window_s[1], targets, Path(name)), arrivals_s=(), prompts=[])
        outcomes = [draw(recorded, load, machine, seed, scheduler) for seed in range(CAPPED_DRAWS)]
    return median(_offline_tokens_per_s(outcome, window_s) for outcome in outcomes)


def draw(
    recorded: Recorded, load: DrivenLoad, machine: MachineModel, seed: int, scheduler: SchedulerConfig | None = None
) -> Outcome:
    """Simulates one draw of the load.

    Args:
        scheduler: replaces the recorded one.
    """
    header, clock = recorded.header, VirtualClock()
    executor = TraceExecutor(
        header.num_blocks,
        machine,
        clock,
        lambda _: NEVER,
        lambda name: name.startswith("online"),
        step_factors=machine.factors(seed),
        layers=Layers(GIVE_UP_PIECES, 0.0),
    )
    model, _ = recorded.learnt(0.0)
    headroom = build_headroom(header.recipe["headroom"], header.num_blocks)
    cache = CacheConfig(block_size=header.block_size, enable_prefix_cache=header.prefix_cache)
    config = EngineConfig(cache=cache, scheduler=scheduler or header.scheduler)
    hosts = [Host(clock, recorded.host_s)] if header.scheduler.overlap_depth else []
    core = EngineCore(config, executor, model, headroom, clock, observers=hosts)
    return drive(core, clock, load, executor)


def figures_of(outcome: Outcome, window_s: Sequence[float], targets: Targets, way: Way) -> Figures:
    begin_s, end_s = window_s
    records = [one for one in outcome.measures.online.values() if begin_s <= one.arrival_s < end_s]
    steps = outcome.measures.steps((begin_s, end_s))
    computed = sum(step.shape.num_tokens for step in outcome.steps if begin_s < step.end_s <= end_s)
    offline = float(steps["computed_tokens"].sum())
    in_engine_s = [one.first_s - one.arrival_s for one in records]
    return _figures(
        in_engine_s,
        [ttft_s + way.seconds for ttft_s in in_engine_s],
        [one.tpot_s for one in records],
        sum(_met(one, targets, way) for one in records) / len(records),
        _offline_tokens_per_s(outcome, window_s),
        (computed - offline) / (end_s - begin_s),
    )


def _offline_tokens_per_s(outcome: Outcome, window_s: Sequence[float]) -> float:
    """Offline tokens/s without recomputed tokens."""
    begin_s, end_s = window_s
    steps = outcome.measures.steps((begin_s, end_s))
    return float(steps["computed_tokens"].sum() - steps["recomputed_tokens"].sum()) / (end_s - begin_s)


def _met(record: OnlineRecord, targets: Targets, way: Way) -> bool:
    return (
        record.is_done
        and record.first_s - record.arrival_s + way.seconds <= targets.ttft_s
        and (record.tpot_s is None or record.tpot_s <= targets.tpot_s)
    )


def real_figures(window: Window, targets: Targets, recorded: Recorded) -> Figures:
    begin_s, end_s = window.clock_s
    return _figures(
        [first_s - arrival_s for arrival_s, first_s in recorded.served if begin_s <= arrival_s < end_s],
        [record.ttft_s for record in window.records],
        [record.tpot_s for record in window.records],
        attainment(window.records, targets.ttft_s, targets.tpot_s),
        window.offline_tokens_per_s,
        window.online_tokens_per_s,
    )


def _figures(
    in_engine_s: Sequence[float],
    ttft_s: Sequence[float | None],
    tpot_s: Sequence[float | None],
    met: float,
    offline: float,
    online: float,
) -> Figures:
    ttft, tpot = percentiles(ttft_s), percentiles(tpot_s)
    return {
        "attainment": round(met, 4),
        "ttft_in_engine_p50_ms": round(1e3 * percentiles(in_engine_s).p50, 1),
        "ttft_p50_ms": round(1e3 * ttft.p50, 1),
        "ttft_p99_ms": round(1e3 * ttft.p99, 1),
        "tpot_p50_ms": round(1e3 * tpot.p50, 1),
        "tpot_p99_ms": round(1e3 * tpot.p99, 1),
        "offline_tokens_per_s": round(offline, 1),
        "online_tokens_per_s": round(online, 1),
    }


def holds(real: Figures, figures: Figures) -> bool:
    return all(abs(figures[name] / real[name] - 1.0) <= error for name, error in ERROR_OF.items())


def print_prediction(found: Mapping[str, Any]) -> None:
    if "failed" in found:
        print(f"no prediction: {found['failed']}")
        return
    real, before, whole = found["real"], found["known_before"], found["known_afterwards"]
    rows = []
    for name, value in real.items():
        bound = f"{ERROR_OF[name]:.0%}" if name in ERROR_OF else "-"
        cells = [f"{value:,.3g}", bound]
        for figures in (before, whole):
            ratio = f" ({figures[name] / value:.3f})" if value else ""
            cells.append(f"{figures[name]:,.3g}{ratio}")
        rows.append([name, *cells])
    of_machine = [*OF_MACHINE, *(name for name in whole if name.startswith("of_predicted_"))]
    rows += [[name, "", "", *(f"{figures[name]:.3f}" for figures in (before, whole))] for name in of_machine]
    columns = ["", "real", "allowed", "simulated, known before", "simulated, known afterwards"]
    decided = found["decided_otherwise"] or "none"
    share = "-" if found["share_of_it"] is None else f"{found['share_of_it']:.3f}"
    print(
        "simulated ceiling with limited steps on this run's machine: "
        f"{found['capped_tokens_per_s']:,.0f} tok/s; share {share}"
    )
    print_table(f"the simulator on this run; difference in {found['steps']} replayed steps: {decided}", columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="path of a kept run, without the suffixes")
    for path in parser.parse_args(argv).runs:
        seen = late.seen_of(path)
        if not seen.clock_s[1]:
            parser.error(f"{path} was kept before 2026-11-27, when the time of the window was not recorded")
        found = predict(late.log_of(path), seen.window, seen.targets)
        print_prediction(found)
        print(json.dumps(jsonable(found), allow_nan=False))


if __name__ == "__main__":
    main()

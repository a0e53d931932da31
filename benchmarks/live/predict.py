"""What the simulator makes of a live run: the same arrivals on a virtual clock, beside what the clients saw.

Everything is taken from the run's own step log. It is replayed first: today's scheduler must decide every step as it
was decided, and the replay gives the shapes of the steps. Then the load is simulated twice, with step times as the
engine's cost model had learnt them when the window of measurement began, and, to tell the machine's wandering from the
simulator's own error, as it would have learnt them from the whole run.

The simulator ends at the engine. What a client waits besides, until its request has been read and from the end of the
step that made its first token until it has that, is measured on the run's own requests (their median) and added: on
those of before the window for the first simulation, on all for the second.

    python -m benchmarks.live.predict KEPT/load-0.2-seed-0-beside [...]    # a run that was kept with ``--keep``

A machine that changes its speed between two runs makes ``share`` what it likes, for the capped ceiling is a run of its
own. So that ceiling is simulated, too, on the machine that this run had: what is short of it is the scheduler's doing.
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
from neaptide.loadgen.client.recorder import Record, attainment
from neaptide.loadgen.percentiles import percentiles
from neaptide.simulation.driven_runs import DRAWS, ERRORS, NEVER, Load, MachineModel, Outcome, Shapes, Step, drive
from neaptide.simulation.measures import Copied, Measures, OnlineRecord
from neaptide.simulation.replay import replay

MAX_HOST_S = 0.05
"""Between two steps; a longer gap means that there was nothing to do."""
VOCABULARY = 1000
GIVE_UP_PIECES = 30 * 9
"""Of a step: the 111M model's layers are so many kernels, and it may be given up before each."""
AFTER_IDLE = "after_idle"
CAPPED_DRAWS = 3
"""Of a whole run's steps; nothing in it waits for a single one."""
OF_MACHINE = ("step_error", "step_noise", "way_to_engine_ms", "way_to_client_ms")
"""Beside the figures."""
ERROR_OF = {
    "ttft_p50_ms": ERRORS["p50"],
    "ttft_p99_ms": ERRORS["p99"],
    "tpot_p50_ms": ERRORS["p50"],
    "tpot_p99_ms": ERRORS["p99"],
    "offline_tokens_per_s": ERRORS["tokens/s"],
    "online_tokens_per_s": ERRORS["tokens/s"],
}
"""What a prediction may be off, relative."""
Figures = dict[str, float]


class Way(NamedTuple):
    """Of a request through client, network and API process; medians."""

    to_engine_s: float
    """From when it was due until the server had all of it, from when the engine counts."""
    to_client_s: float
    """From the end of the step that made the first token until the client had it."""

    @property
    def seconds(self) -> float:
        return self.to_engine_s + self.to_client_s


class Host(EngineObserver):
    """Takes its time for every plan."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def planning(self, now_s: float) -> None:
        self._clock.sleep_until(self._clock.now() + self._seconds)


@dataclass(slots=True)
class Recorded:
    """What the log says. Times are in seconds from when the batch came."""

    header: HeaderLine
    begin_s: float = 0.0
    """When that was, on the engine's clock."""
    warm_up: list[tuple[BatchShape, float]] = field(default_factory=list)
    """Steps that the cost model was shown before the first."""
    arrivals_s: list[float] = field(default_factory=list)
    served: list[tuple[float, float]] = field(default_factory=list)
    """Arrival and first token of online requests that had one, on the engine's clock, in the order of arrival."""
    rows: int = 0
    row_tokens: int = 0
    steps: list[Step] = field(default_factory=list)
    difference: str | None = None
    """Of the replay."""
    planned_early_s: list[float] = field(default_factory=list)
    """Of an engine one step ahead, by step: how long before the step in flight could end the next plan was begun."""

    @property
    def host_s(self) -> float:
        """What planning and submitting take of the host where a step is in flight: the engine keeps both twice."""
        return median(self.planned_early_s) / 2 if self.planned_early_s else 0.0

    def learnt(self, until_s: float) -> tuple[OnlineCostModel, list[Step]]:
        """The engine's cost model after the steps that had ended by then, and these steps."""
        model = build_cost_model(self.header.recipe["cost_model"])
        assert isinstance(model, OnlineCostModel)
        known = [step for step in self.steps if step.end_s <= until_s]
        for shape, seconds in (*self.warm_up, *((step.shape, step.seconds) for step in known)):
            model.observe(shape, seconds)
        return model, known

    def way(self, records: Sequence[Record]) -> Way:
        """Of these requests; none of time if none had a first token."""
        arrivals_s, ways = [arrival_s for arrival_s, _ in self.served], []
        for record in records:
            index = bisect_left(arrivals_s, record.sent_s)
            if record.token_times_s and index < len(self.served):
                arrival_s, first_s = self.served[index]
                ways.append((arrival_s - record.start_s, record.token_times_s[0] - first_s))
        return Way(*(median(part) for part in zip(*ways, strict=True))) if ways else Way(0.0, 0.0)


def read(log: Path) -> Recorded:
    """Raises ValueError if the log is damaged or names no batch."""
    lines = list(read_log(log))
    header = lines[0]
    assert isinstance(header, HeaderLine)
    found = Recorded(header)
    batches = [line for line in lines if isinstance(line, BatchLine)]
    if not batches:
        raise ValueError(f"{log} names no batch")
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
        if header.scheduler.overlap_depth:  # planned while the one before it ran
            if start_s < ended_s:
                found.planned_early_s.append(max(earliest_end_s - start_s, 0.0))
            begun_s, host_s = max(begun_s, ended_s), 0.0
            earliest_end_s = begun_s + line.predicted[0] - line.predicted[1]
        if not line.given_up:
            found.steps.append(Step(start_s, end_s - begun_s, host_s, shapes.last))
        ended_s = end_s
        measures.step(outputs, StepTally(), Copied(), line.t[-1])

    found.difference = replay(log, on_step=take, observers=[shapes]).difference
    found.served = sorted((one.arrival_s, one.first_s) for one in measures.online.values() if one.tokens)
    return found


def predict(log: Path, real: Window, targets: Targets) -> dict[str, Any]:
    """The real run's figures, and those of the simulations, by what is known of the step times."""
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
    """Medians over draws of what steps scatter by."""
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


def by_kind(machine: CostModel, steps: Sequence[Step]) -> dict[str, float]:
    """What steps of each kind took, planning and committing included, over what was predicted for them: a kind that is
    off by itself is the model's fault, all together are the machine's. Kinds without steps are left out."""
    kinds: dict[str, list[Step]] = {}
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


def load_of(recorded: Recorded, end_s: float, targets: Targets, directory: Path) -> Load:
    """The recorded arrivals; texts of the same lengths, of which no two are alike."""
    stem = str(directory / "offline")
    with TokenFileWriter(stem) as writer:
        for prompt in random_prompts(recorded.rows, recorded.row_tokens, FIRST_TOKEN_ID + VOCABULARY, seed=1):
            writer.append(prompt)
    prompts = random_prompts(len(recorded.arrivals_s), ONLINE_IN, FIRST_TOKEN_ID + VOCABULARY, seed=2)
    return Load(recorded.arrivals_s, prompts, stem, recorded.rows, end_s, targets.ttft_s, targets.tpot_s)


def capped_tokens_per_s(recorded: Recorded, window_s: Sequence[float], targets: Targets) -> float:
    """Of offline work alone in steps capped at the TPOT target, as the machine was in this run; a median over draws."""
    model, known = recorded.learnt(window_s[1])
    machine, cap = MachineModel(model.as_it_is(), known), targets.capping
    scheduler = msgspec.structs.replace(
        recorded.header.scheduler, ttft_slo_s=cap.ttft_s, tpot_slo_s=cap.tpot_s, gives_up_steps=False
    )
    with TemporaryDirectory() as name:
        load = replace(load_of(recorded, window_s[1], targets, Path(name)), arrivals_s=(), prompts=[])
        outcomes = [draw(recorded, load, machine, seed, scheduler) for seed in range(CAPPED_DRAWS)]
    return median(_offline_tokens_per_s(outcome, window_s) for outcome in outcomes)


def draw(
    recorded: Recorded, load: Load, machine: MachineModel, seed: int, scheduler: SchedulerConfig | None = None
) -> Outcome:
    """
    Args:
        scheduler: in place of the recorded one.
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
    """Without what was computed again."""
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
        f"capped ceiling of this run's own machine, simulated: {found['capped_tokens_per_s']:,.0f} tok/s; share {share}"
    )
    print_table(f"the simulator on this run; of {found['steps']} steps decided otherwise: {decided}", columns, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a path in KEPT, without its suffixes")
    for path in parser.parse_args(argv).runs:
        seen = late.seen_of(path)
        if not seen.clock_s[1]:
            parser.error(f"{path} was kept before 2026-11-27: nothing says when its window was")
        found = predict(late.log_of(path), seen.window, seen.targets)
        print_prediction(found)
        print(json.dumps(jsonable(found), allow_nan=False))


if __name__ == "__main__":
    main()

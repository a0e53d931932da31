"""The runs of the live experiment in their order, and the figures made from them."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.live.curve import Point, mean_points, point_of, rival_ratios, standing
from benchmarks.live.engines import Engine
from benchmarks.live.plan import LAX_S, TPOT_OVER_ALONE, Plan, Targets, Window, slo_flags
from benchmarks.live.predict import predict
from benchmarks.live.run import check, run
from benchmarks.live.tables import summary
from neaptide.loadgen.client.recorder import attainment
from neaptide.loadgen.percentiles import percentiles


@dataclass(slots=True, frozen=True)
class Case:
    """Online load: how much of the ceiling, and how it arrives."""

    load: float
    shape: str = "poisson"

    @property
    def name(self) -> str:
        return f"{self.load:.2f}" + ("" if self.shape == "poisson" else f" {self.shape}")


@dataclass(slots=True, frozen=True)
class Experiment:
    cases: tuple[Case, ...]
    """The first is the headline."""
    repeats: int
    engines: tuple[Engine, ...]
    """The first is the headline."""
    over_alone: tuple[float, ...] = (TPOT_OVER_ALONE,)
    """TPOT targets of our curve, in TPOT p50s of online alone; the headline's belongs to it in any case."""
    least_ttft_over_alone: float = 0.0
    """The TTFT target is so many TTFT p50s of online alone at least; contracts know no such bound."""
    predicts: bool = False
    """Whether the headline's run is simulated as well."""

    @property
    def has_curve(self) -> bool:
        """More is measured than the headline's own runs."""
        return set(self.over_alone) != {TPOT_OVER_ALONE} or any(engine.rivals for engine in self.engines)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Of the servers that are started in it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def share_of(most_tokens_per_s: float, both: Window) -> float | None:
    """Offline work, of what a ceiling leaves beside the online work; None if it leaves nothing."""
    left = most_tokens_per_s - both.online_tokens_per_s
    return round(both.offline_tokens_per_s / left, 4) if left > 0.0 else None


@dataclass(slots=True, frozen=True)
class Alone:
    """Medians of online alone with lax targets, of the fastest server on these kernels."""

    ttft_s: float
    tpot_s: float

    def targets(self, tpot_over_alone: float, experiment: Experiment) -> Targets:
        return Targets.of_tpot(tpot_over_alone * self.tpot_s, experiment.least_ttft_over_alone * self.ttft_s)


async def probe_alone(plan: Plan, engine: Engine) -> Alone:
    probes = [await run(plan, [*engine.flags, *slo_flags(LAX_S, LAX_S)], online=True, offline=False)]
    for rival in engine.rivals[:1]:
        probes += await rival.probe(plan)
    if not all(any(r.tpot_s for r in probe.records) for probe in probes):
        raise SystemExit(f"no chat was answered in the window at {plan.rate_rps:.3f} requests/s: take a longer run")
    return Alone(
        min(percentiles(r.ttft_s for r in probe.records).p50 for probe in probes),
        min(percentiles(r.tpot_s for r in probe.records).p50 for probe in probes),
    )


async def measure_case(
    plan: Plan, case: Case, ceiling: Window, engine: Engine, experiment: Experiment
) -> dict[str, Any]:
    """All runs at one load on one engine."""
    plan = replace(plan.at_load(case.load, ceiling.offline_tokens_per_s), shape=case.shape)
    alone = await probe_alone(plan, engine)
    targets = alone.targets(TPOT_OVER_ALONE, experiment)
    load = f"{case.load}" + ("" if case.shape == "poisson" else f", {case.shape}")
    print(
        f"load {load}: {plan.rate_rps:.2f} requests/s; online alone TTFT p50 {1e3 * alone.ttft_s:.0f} ms, TPOT p50 "
        f"{1e3 * alone.tpot_s:.0f} ms; targets {1e3 * targets.ttft_s:.0f} and {1e3 * targets.tpot_s:.0f} ms",
        flush=True,
    )
    windows = {
        "online alone": await run(plan, [*engine.flags, *targets.flags], online=True, offline=False),
        "offline, capped": await run(plan, [*engine.flags, *targets.cap_flags], online=False, offline=True),
        "offline": ceiling,
    }
    is_headline = (case, engine) == (experiment.cases[0], experiment.engines[0])
    windows["both"], prediction = await run_both(plan, engine, targets, predicts=experiment.predicts and is_headline)
    result = {
        "load": case.load,
        "ratios": ratios_of(windows, targets),
        "rate_rps": round(plan.rate_rps, 3),
        "targets_ms": {"ttft": round(1e3 * targets.ttft_s, 1), "tpot": round(1e3 * targets.tpot_s, 1)},
        # Steps stay below the cap by the safety margin: a ceiling measured with shorter steps flatters `share`.
        "capped_step_over_cap": round(windows["offline, capped"].mean_step_ms / (1e3 * targets.tpot_s), 3),
    }
    if experiment.has_curve:
        result |= {"engine": engine.name, "arrivals": case.shape}
        points = await curve_points(plan, engine, alone, experiment, windows)
        headline = point_of(curve_name(TPOT_OVER_ALONE), windows["both"], targets, TPOT_OVER_ALONE)
        rivals = await rival_points(plan, engine, targets, windows)
        result["ratios"] |= rival_ratios(headline, rivals)
        result["alone"] = point_of("online alone", windows["online alone"], targets)
        result["points"] = [*sorted([*points, headline], key=lambda point: point.over_alone or 0.0), *rivals]
    runs = [summary(name, window, targets.ttft_s, targets.tpot_s) for name, window in windows.items()]
    return result | {"runs": runs} | ({"prediction": prediction} if prediction else {})


async def run_both(
    plan: Plan, engine: Engine, targets: Targets, *, predicts: bool
) -> tuple[Window, dict[str, Any] | None]:
    """The headline's run, and what the simulator makes of it."""
    flags = [*engine.flags, *targets.flags]
    if not predicts:
        return await run(plan, flags, online=True, offline=True), None
    with TemporaryDirectory() as directory:
        log = Path(directory) / "steps.jsonl"
        window = await run(plan, flags, online=True, offline=True, step_log=log)
        try:
            return window, predict(log, window, targets)
        except ValueError as error:
            return window, {"failed": str(error)}


def ratios_of(windows: Mapping[str, Window], targets: Targets) -> dict[str, float | None]:
    """The headline's, without rivals."""
    both, alone = windows["both"], windows["online alone"]
    met = [attainment(window.records, targets.ttft_s, targets.tpot_s) for window in (both, alone)]
    ttft_p99_s = [percentiles(r.ttft_s for r in window.records).p99 for window in (both, alone)]
    return {
        "share": share_of(windows["offline, capped"].offline_tokens_per_s, both),
        "share_uncapped": share_of(windows["offline"].offline_tokens_per_s, both),
        "attainment_minus_alone": round(met[0] - met[1], 4),
        "ttft_p99_vs_alone": round(ttft_p99_s[0] / ttft_p99_s[1], 4),
        "ttft_p99_vs_rival": None,
        "offline_vs_rival": None,
    }


def curve_name(over_alone: float) -> str:
    return f"target {over_alone:g} x alone"


async def curve_points(
    plan: Plan, engine: Engine, alone: Alone, experiment: Experiment, windows: dict[str, Window]
) -> list[Point]:
    """Ours at every target of the curve but the headline's, which is measured anyway; adds to ``windows``."""
    points = []
    for multiple in experiment.over_alone:
        if multiple != TPOT_OVER_ALONE:
            name, targets = curve_name(multiple), alone.targets(multiple, experiment)
            windows[name] = await run(plan, [*engine.flags, *targets.flags], online=True, offline=True)
            points.append(point_of(name, windows[name], targets, multiple))
            print(f"  {name}: {windows[name].offline_tokens_per_s:.0f} offline tok/s", flush=True)
    return points


async def rival_points(plan: Plan, engine: Engine, targets: Targets, windows: dict[str, Window]) -> list[Point]:
    """The rivals on the same kernels; adds to ``windows``."""
    points = []
    for rival in engine.rivals:
        windows[rival.name] = await rival.run(plan, targets)
        points.append(point_of(rival.name, windows[rival.name], targets))
        print(f"  {rival.name}: {windows[rival.name].offline_tokens_per_s:.0f} offline tok/s", flush=True)
    return points


async def measure(plan: Plan, experiment: Experiment) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    checked = 0
    ceilings: dict[str, Window] = {}
    for engine in experiment.engines:
        with environment(engine.environment):
            checked += await check(plan, engine.flags)
            print(f"correctness: {checked} tokens agree with transformers", flush=True)
            ceilings[engine.name] = await run(
                plan, [*engine.flags, *slo_flags(LAX_S, LAX_S)], online=False, offline=True
            )
            print(f"ceiling: {ceilings[engine.name].offline_tokens_per_s:.0f} tok/s", flush=True)
    # By turns: every repeat runs all engines at all loads, so that a machine that changes its speed favours none.
    for repeat in range(experiment.repeats):
        for case in experiment.cases:
            for engine in experiment.engines:
                with environment(engine.environment):
                    turn = replace(plan, seed=plan.seed + repeat)
                    results.append(await measure_case(turn, case, ceilings[engine.name], engine, experiment))
    head = {
        "load": experiment.cases[0].load,
        "arrivals": experiment.cases[0].shape,
        "engine": experiment.engines[0].name,
    }
    headline = [r["ratios"] for r in results if all(r.get(key, value) == value for key, value in head.items())]
    ratios = {name: mean_of([one[name] for one in headline]) for name in headline[0]}
    found = {"ratios": ratios, "window_s": list(plan.window_s), "checked_tokens": checked, "loads": results}
    return found | ({"curves": curves(results)} if experiment.has_curve else {})


def mean_of(values: Sequence[float | None]) -> float | None:
    """None if one of them is."""
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if len(known) == len(values) else None


def curves(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every engine and load, the means over the repeats, and how the rivals stand to our curve."""
    found = []
    keys = dict.fromkeys((r["engine"], r["load"], r["arrivals"]) for r in results)
    for key in keys:
        mine = [r for r in results if (r["engine"], r["load"], r["arrivals"]) == key]
        points = mean_points([r["points"] for r in mine])
        (alone,) = mean_points([[r["alone"]] for r in mine])
        ours, rivals = ([p for p in points if p.is_rival is wanted] for wanted in (False, True))
        found.append(
            dict(zip(("engine", "load", "arrivals"), key, strict=True))
            | {
                "name": Case(key[1], key[2]).name,
                "alone": alone,
                "points": points,
                "rivals": standing(ours, rivals, alone),
                "capped_tokens_per_s": mean_of([offline_of(r, "offline, capped") for r in mine]),
            }
        )
    return found


def offline_of(result: Mapping[str, Any], run_name: str) -> float:
    (figure,) = (one["offline_tokens_per_s"] for one in result["runs"] if one["run"] == run_name)
    return float(figure)


def jsonable(value: Any) -> Any:
    """Points as their JSON."""
    if isinstance(value, Point):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: jsonable(one) for key, one in value.items()}
    return [jsonable(one) for one in value] if isinstance(value, list | tuple) else value

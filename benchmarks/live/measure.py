"""The runs of the live experiment, in their order."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.live import late
from benchmarks.live.curve import AS_SLOW, point_of, slower_than_ours_ms
from benchmarks.live.engines import Engine
from benchmarks.live.findings import ALONE, BOTH, CAPPED, CEILING, CaseFindings, Findings, curve_name
from benchmarks.live.plan import LAX_S, TPOT_OVER_ALONE, Case, Plan, Targets, Window, slo_flags
from benchmarks.live.predict import predict
from benchmarks.live.run import check, run
from neaptide.loadgen.percentiles import percentiles


@dataclass(slots=True, frozen=True)
class Experiment:
    cases: tuple[Case, ...]
    """The first is the headline."""
    repeats: int
    engines: tuple[Engine, ...]
    """The first is the headline."""
    over_alone: tuple[float, ...] = (TPOT_OVER_ALONE,)
    """TPOT targets of our curve, in TPOT p50s of online work alone. The headline's is always added."""
    least_ttft_over_alone: float = 0.0
    """Least TTFT target, in TTFT p50s of online work alone; real contracts have no such bound."""
    predicts: bool = False
    """Whether the headline's run is also simulated."""
    caps_every_engine: bool = True
    """Otherwise only the headline's, since no point of a curve needs the limited ceiling."""
    kept_in: Path | None = None
    """Directory for the step logs of the headline's engine, with and without the batch, and its clients' records."""
    check_model: Path | None = None
    """Model whose texts are checked, if ``transformers`` on a CPU would take too long for the measured model."""

    @property
    def has_curve(self) -> bool:
        """Whether more is measured than the headline's own runs."""
        return set(self.over_alone) != {TPOT_OVER_ALONE} or any(engine.rivals for engine in self.engines)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the servers that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@dataclass(slots=True, frozen=True)
class Alone:
    """Medians of online work alone without targets, of the fastest server on these kernels."""

    ttft_s: float
    tpot_s: float

    def targets(self, tpot_over_alone: float, experiment: Experiment) -> Targets:
        return Targets.of_tpot(tpot_over_alone * self.tpot_s, experiment.least_ttft_over_alone * self.ttft_s)


async def probe_alone(plan: Plan, engine: Engine) -> Alone:
    probes = [await run(plan, [*engine.flags, *slo_flags(LAX_S, LAX_S)], online=True, offline=False)]
    for rival in engine.rivals[:1]:
        probes += await rival.probe(plan)
    if not all(any(r.tpot_s for r in probe.records) for probe in probes):
        raise SystemExit(f"no chat was answered in the window at {plan.rate_rps:.3f} requests/s: use a longer run")
    return Alone(
        min(percentiles(r.ttft_s for r in probe.records).p50 for probe in probes),
        min(percentiles(r.tpot_s for r in probe.records).p50 for probe in probes),
    )


async def measure_case(plan: Plan, case: Case, engine: Engine, experiment: Experiment, findings: Findings) -> None:
    """Runs everything at one load on one engine; adds to ``findings`` as the runs end."""
    ceiling = findings.ceilings[engine.name]
    plan = replace(plan.at_load(case.load, ceiling.offline_tokens_per_s), shape=case.shape)
    alone = await probe_alone(plan, engine)
    targets = alone.targets(TPOT_OVER_ALONE, experiment)
    load = f"{case.load}" + ("" if case.shape == "poisson" else f", {case.shape}")
    print(
        f"load {load}: {plan.rate_rps:.2f} requests/s; online alone TTFT p50 {1e3 * alone.ttft_s:.0f} ms, TPOT p50 "
        f"{1e3 * alone.tpot_s:.0f} ms; targets {1e3 * targets.ttft_s:.0f} and {1e3 * targets.tpot_s:.0f} ms",
        flush=True,
    )
    found = CaseFindings(case, engine.name, plan.rate_rps, targets, {CEILING: ceiling})
    findings.cases.append(found)

    def keep(name: str, window: Window) -> Window:
        found.windows[name] = window
        print(f"  {name}: {window.offline_tokens_per_s:.0f} offline tok/s", flush=True)
        return window

    flags, is_first = [*engine.flags, *targets.flags], engine == experiment.engines[0]
    predicts = experiment.predicts and is_first and case == experiment.cases[0]
    with TemporaryDirectory() as directory:
        path = Path(directory) / "beside" if predicts else None
        alone_path = None
        if is_first and experiment.kept_in is not None:
            alone_path, path = (late.path_of(experiment.kept_in, case, plan.seed, name) for name in ("alone", "beside"))
        keep(ALONE, await late.run_kept(alone_path, plan, flags, targets, offline=False))
        if is_first or experiment.caps_every_engine:
            keep(CAPPED, await run(plan, [*engine.flags, *targets.cap_flags], online=False, offline=True))
        both = keep(BOTH, await late.run_kept(path, plan, flags, targets, offline=True))
        for multiple in experiment.over_alone:
            if multiple != TPOT_OVER_ALONE:
                name, other = curve_name(multiple), alone.targets(multiple, experiment)
                window = await run(plan, [*engine.flags, *other.flags], online=True, offline=True)
                found.points.append(point_of(name, keep(name, window), other, multiple))
        for rival in engine.rivals:
            window = keep(rival.name, await rival.run(plan, targets))
            found.rivals.append(point_of(rival.name, window, targets))
        if len(experiment.over_alone) > 1 and (slowest_ms := slower_than_ours_ms(found.ours, found.rivals)) is not None:
            multiple = slowest_ms / (1e3 * alone.tpot_s)
            other = alone.targets(multiple, experiment)
            window = await run(plan, [*engine.flags, *other.flags], online=True, offline=True)
            found.points.append(point_of(AS_SLOW, keep(AS_SLOW, window), other, multiple))
        if path is not None and predicts:
            # Last, because it takes minutes of CPU time and is optional.
            try:
                found.prediction = predict(late.log_of(path), both, targets)
            except ValueError as error:
                found.prediction = {"failed": str(error)}


async def measure(plan: Plan, experiment: Experiment, findings: Findings) -> None:
    """Runs everything; adds to ``findings`` as the runs end."""
    for engine in experiment.engines:
        with environment(engine.environment):
            checked = replace(plan, model=experiment.check_model or plan.model)
            findings.checked_tokens += await check(checked, engine.flags)
            print(f"correctness: {findings.checked_tokens} tokens agree with transformers", flush=True)
            lax = [*engine.flags, *slo_flags(LAX_S, LAX_S)]
            findings.ceilings[engine.name] = await run(plan, lax, online=False, offline=True)
            print(f"ceiling: {findings.ceilings[engine.name].offline_tokens_per_s:.0f} tok/s", flush=True)
    # In turn: every repeat runs all engines at all loads, so that drift of the machine's speed favours none.
    for repeat in range(experiment.repeats):
        for case in experiment.cases:
            for engine in experiment.engines:
                with environment(engine.environment):
                    turn = replace(plan, seed=plan.seed + repeat)
                    await measure_case(turn, case, engine, experiment, findings)

"""How often a forecast of online KV demand holds, and how much memory it takes from offline work.

The demand is that of ``kv_demand``; one token stands for one block. Every second each forecast, which has seen the past
only, says how much to reserve; it is right if the most that is held in the next 30 s stays within.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neaptide.estimator.forecast import (
    WARM_UP_ARRIVALS,
    ConformalForecast,
    MuSigmaForecast,
    QuantileForecast,
    TwoSpeedForecast,
    WindowForecast,
)
from neaptide_lab.experiments.kv_demand import (
    CASES,
    QUICK_REPLAY_S,
    TICK_S,
    VARIANTS,
    Case,
    Requests,
    Tokens,
    demand_tokens,
    requests_of,
)
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "forecast-coverage"
ABOUT = "how often forecasts of online KV demand hold on the recorded traces, and what they reserve for it"

CAPACITY_TOKENS = 400_000
SAMPLES_PER_S = 10
"""The forecasts see the most that was held in each tenth of a second, about as often as an engine plans a step."""
HORIZON_S = 30

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Family:
    """A forecast, its knob as published or nominally 95%, and the knobs of its curve."""

    label: str
    nominal: float
    knobs: tuple[float, ...]
    make: Callable[[float], WindowForecast]


MU_SIGMA = Family(
    "mu + k sigma",
    2.0,
    (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0),
    lambda k: MuSigmaForecast(CAPACITY_TOKENS, k, horizon_s=HORIZON_S),
)
QUANTILE = Family(
    "quantile",
    0.95,
    (0.05, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0),
    lambda q: QuantileForecast(CAPACITY_TOKENS, q, horizon_s=HORIZON_S),
)
CONFORMAL = Family(
    "conformal",
    0.05,
    (0.8, 0.6, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.03, 0.02, 0.01),
    lambda alpha: ConformalForecast(CAPACITY_TOKENS, alpha, horizon_s=HORIZON_S),
)
TWO_SPEED = Family(
    "two-speed", 0.05, CONFORMAL.knobs, lambda alpha: TwoSpeedForecast(CAPACITY_TOKENS, alpha, horizon_s=HORIZON_S)
)
FAMILIES = (MU_SIGMA, QUANTILE, CONFORMAL, TWO_SPEED)
DEFINITION = (
    "Coverage: share of seconds at which the most held in the next 30 s is within the reservation. The oracle reserves "
    "exactly that peak. Peaks beyond the capacity are left out, for no reservation covers them."
)
INTERPOLATED = "Between the knobs tried is interpolated."
CLAIMED = 95.0
"""Percent of cases that Echo (section 5.3) says mu + 2 sigma covers."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """One forecast with one knob on one trace. Shares of time; memory relative to the oracle's."""

    knob: float
    coverage: float
    """The peak of the next 30 s was within the reservation."""
    momentary_coverage: float
    """What was held at a moment of the next 30 s was: the weaker promise that Echo makes."""
    reserved_of_oracle: float
    """Mean reservation over the mean of the peaks: what a forecast that knows the future would reserve."""
    reserved_of_demand: float


@dataclass(slots=True, frozen=True)
class Curves:
    """All outcomes on one trace, by the label of the forecast, in the order of its knobs."""

    case: str
    seconds: int
    """Seconds judged: after the warm-up, with a whole horizon after them."""
    mean_tokens: float
    oracle_tokens: float
    outcomes: dict[str, list[Outcome]]
    beyond_capacity: float = 0.0
    """Share of the seconds that were not judged, because the most held in the next 30 s is more than there is."""

    def nominal(self, family: Family) -> Outcome:
        return next(outcome for outcome in self.outcomes[family.label] if outcome.knob == family.nominal)

    def coverage_at(self, family: Family, reserved_of_oracle: float) -> float:
        """On the curve between the knobs tried; beyond its ends that of the end: a quantile never asks for more."""
        points = sorted((outcome.reserved_of_oracle, outcome.coverage) for outcome in self.outcomes[family.label])
        return float(np.interp(reserved_of_oracle, [x for x, _ in points], [y for _, y in points]))


def reservations(forecast: WindowForecast, samples: Tokens, arrivals_s: Sequence[float]) -> Tokens:
    """What the forecast reserves at the start of each second.

    samples: tokens held, shape [seconds, samples per second]; a forecast sees those up to its own time only.
    """
    reserved = np.zeros(len(samples), np.int64)
    arrivals = iter([*arrivals_s, float("inf")])
    next_arrival_s = next(arrivals)
    step_s = 1 / samples.shape[1]
    for second, held in enumerate(samples.tolist()):
        while next_arrival_s <= second:
            forecast.observe_arrival(next_arrival_s)
            next_arrival_s = next(arrivals)
        forecast.observe(second, held[0])
        reserved[second] = forecast.headroom_blocks(second)
        for k in range(1, len(held)):
            forecast.observe(second + k * step_s, held[k])
    return reserved


def measure(label: str, requests: Requests) -> Curves:
    """All forecasts with all knobs on one trace. It needs more requests than the warm-up, and some minutes.

    Raises ValueError if more is held than there is at all times.
    """
    log.info("trace %s", label)
    arrivals_s = requests[0]
    held = demand_tokens(requests)
    ticks = round(1 / TICK_S)
    seconds = len(held) // ticks
    samples = held[: seconds * ticks].reshape(seconds, SAMPLES_PER_S, -1).max(axis=2)
    horizons = np.lib.stride_tricks.sliding_window_view(samples.reshape(-1), HORIZON_S * SAMPLES_PER_S)[::SAMPLES_PER_S]
    first = max(int(arrivals_s[WARM_UP_ARRIVALS - 1]), HORIZON_S) + 1
    horizons, peaks = horizons[first:], horizons[first:].max(axis=1)
    inside = peaks <= CAPACITY_TOKENS
    if not inside.any():
        raise ValueError(
            f"{label}: more than {CAPACITY_TOKENS:,} tokens are held at all times, which no forecast covers; a lower "
            "--speed helps"
        )
    horizons, judged_peaks = horizons[inside], peaks[inside]
    mean_tokens, oracle_tokens = float(samples[first:].mean()), float(judged_peaks.mean())

    def judge(family: Family, knob: float) -> Outcome:
        reserved = reservations(family.make(knob), samples, arrivals_s)[first : first + len(peaks)][inside]
        return Outcome(
            knob,
            float((judged_peaks <= reserved).mean()),
            float((horizons <= reserved[:, None]).mean()),
            float(reserved.mean()) / oracle_tokens,
            float(reserved.mean()) / mean_tokens,
        )

    outcomes = {family.label: [judge(family, knob) for knob in family.knobs] for family in FAMILIES}
    return Curves(label, len(judged_peaks), mean_tokens, oracle_tokens, outcomes, 1.0 - float(inside.mean()))


def run(quick: bool) -> ExperimentResult:
    traces = [measure(case.label, requests_of(case, quick)) for case in CASES]
    variants = [] if quick else [measure(case.label, requests_of(case, quick)) for case in VARIANTS]
    groups = {"recommended speeds": traces} | ({"other speeds, seeds": variants} if variants else {})
    rows = [row for trace in traces for row in _trace_rows(trace)]
    rows += [row for label, group in groups.items() for row in _group_rows(label, group)]
    data = {
        "quick": quick,
        "capacity_tokens": CAPACITY_TOKENS,
        "traces": [asdict(trace) for trace in traces],
        "variants": [asdict(trace) for trace in variants],
    }
    return ExperimentResult(NAME, rows, _notes(traces, variants, quick), data, lambda figure: _plot(traces, figure))


def run_trace(trace: str, speed: float, quick: bool) -> ExperimentResult:
    """The same measure on a trace of the user's: a name or a file.

    Raises ValueError for a trace that cannot be read or is over before a forecast can be judged.
    """
    requests = requests_of(Case(Path(trace).name, trace, speed), quick)
    if len(requests[0]) <= WARM_UP_ARRIVALS or requests[0][-1] < requests[0][WARM_UP_ARRIVALS - 1] + 3 * HORIZON_S:
        raise ValueError(
            f"{trace} is too short: the forecasts need {WARM_UP_ARRIVALS} requests, and {3 * HORIZON_S} s after them "
            "to be judged by; a longer trace or a lower --speed helps"
        )
    curves = measure(Path(trace).name, requests)
    data = {"quick": quick, "capacity_tokens": CAPACITY_TOKENS, "speed": speed, "traces": [asdict(curves)]}
    notes = [DEFINITION, f"Judged on {curves.seconds // HORIZON_S} horizons that do not overlap. " + INTERPOLATED]
    return ExperimentResult(NAME, _trace_rows(curves), notes, data, lambda figure: _plot([curves], figure))


def one_knob(traces: Sequence[Curves], family: Family) -> tuple[float, float]:
    """Mean and worst coverage over the traces with the one knob that reserves as much as conformal 95% on average."""
    reserved = float(np.mean([trace.nominal(CONFORMAL).reserved_of_oracle for trace in traces]))
    by_knob = zip(*[trace.outcomes[family.label] for trace in traces], strict=True)
    points = sorted(
        (
            float(np.mean([o.reserved_of_oracle for o in outcomes])),
            float(np.mean([o.coverage for o in outcomes])),
            min(o.coverage for o in outcomes),
        )
        for outcomes in by_knob
    )
    price = [point[0] for point in points]
    mean, worst = (float(np.interp(reserved, price, [point[k] for point in points])) for k in (1, 2))
    return mean, worst


def knob_for_each(traces: Sequence[Curves], family: Family) -> float:
    """Mean coverage where the knob of each trace is what reserves as much there as conformal 95% does."""
    return float(np.mean([trace.coverage_at(family, trace.nominal(CONFORMAL).reserved_of_oracle) for trace in traces]))


def _trace_rows(trace: Curves) -> list[Row]:
    published = trace.nominal(MU_SIGMA)
    rows = [
        _coverage_row(f"{trace.case}: mu + 2 sigma, moments of the next 30 s", published.momentary_coverage, CLAIMED),
        _coverage_row(f"{trace.case}: mu + 2 sigma, {_price(published)}", published.coverage, CLAIMED),
    ]
    for family in (QUANTILE, CONFORMAL, TWO_SPEED):
        nominal = trace.nominal(family)
        rows.append(_coverage_row(f"{trace.case}: {family.label} 95%, {_price(nominal)}", nominal.coverage))
    if trace.beyond_capacity:
        rows.append(
            Row(f"{trace.case}: beyond the capacity, not judged", 100 * trace.beyond_capacity, unit="%", digits=1)
        )
    for reference in (CONFORMAL, MU_SIGMA):
        reserved = trace.nominal(reference).reserved_of_oracle
        rows += [
            _coverage_row(
                f"{trace.case}: {family.label} at {reserved:.2f} of oracle", trace.coverage_at(family, reserved)
            )
            for family in FAMILIES
            if family is not reference
        ]
    return rows


def _group_rows(label: str, group: Sequence[Curves]) -> list[Row]:
    """All at the reservation of conformal 95%: with one knob for all traces, then with the best knob for each."""
    rows = []
    for family in FAMILIES:
        mean, worst = one_knob(group, family)
        rows.append(_coverage_row(f"{label}: {family.label}, one knob for all, mean", mean))
        rows.append(_coverage_row(f"{label}: {family.label}, one knob for all, worst trace", worst))
    for family in FAMILIES:
        rows.append(_coverage_row(f"{label}: {family.label}, a knob for each, mean", knob_for_each(group, family)))
    return rows


def _coverage_row(case: str, coverage: float, paper: float | None = None) -> Row:
    return Row(case, 100 * coverage, paper, unit="%", digits=1)


def _price(outcome: Outcome) -> str:
    return f"reserves {outcome.reserved_of_oracle:.2f} of oracle, {outcome.reserved_of_demand:.2f} of demand"


def _k_for_95(trace: Curves) -> str:
    """The k with which mu + k sigma would have covered 95% of the peaks, known only afterwards."""
    outcomes = trace.outcomes[MU_SIGMA.label]
    if outcomes[-1].coverage < 0.95:
        return f"over {outcomes[-1].knob:.0f} ({trace.case})"
    return f"{np.interp(0.95, [o.coverage for o in outcomes], [o.knob for o in outcomes]):.1f} ({trace.case})"


def _notes(traces: Sequence[Curves], variants: Sequence[Curves], quick: bool) -> list[str]:
    published = [trace.nominal(MU_SIGMA) for trace in traces]
    independent = [trace.seconds // HORIZON_S for trace in traces]
    notes = [
        DEFINITION,
        f"mu + 2 sigma covers {_span([o.momentary_coverage for o in published])} of the moments, which is how we read "
        f"Echo's 95%, but only {_span([o.coverage for o in published])} of the peaks that offline work must make "
        "room for.",
        f"To cover 95% of the peaks k would have to be {', '.join(_k_for_95(trace) for trace in traces)}.",
        f"A replay has {min(independent)} to {max(independent)} horizons that do not overlap: a difference of two or "
        "three points on one trace means little.",
        f"{INTERPOLATED} The fixed settings of conformal (gain, weight of the present) were "
        "picked on the recommended speeds; the starts of the agents' sessions are drawn.",
    ]
    for label, group in (("At the recommended speeds", traces), ("At other speeds and seeds", variants)):
        if group:
            covered, two_speed = (
                _span([trace.nominal(family).coverage for trace in group]) for family in (CONFORMAL, TWO_SPEED)
            )
            first = max(FAMILIES, key=lambda family: one_knob(group, family)).label
            afterwards = max(FAMILIES, key=lambda family: knob_for_each(group, family)).label
            notes.append(
                f"{label} conformal with alpha 0.05 covers {covered} of the peaks, two-speed {two_speed} at "
                f"{_reserved_share(group):.2f} of its reservation. At that of conformal the best on "
                f"average is, with one knob for all traces, {first}; with a knob for each, known only afterwards, "
                f"{afterwards}."
            )
    if quick:
        notes.append(f"Quick: the first {QUICK_REPLAY_S} s of each replay, less than the forecasts' window.")
    return notes


def _reserved_share(group: Sequence[Curves]) -> float:
    """Mean reservation of two-speed over that of conformal."""
    two_speed, conformal = (
        float(np.mean([trace.nominal(family).reserved_of_oracle for trace in group]))
        for family in (TWO_SPEED, CONFORMAL)
    )
    return two_speed / conformal


def _span(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.1f} to {100 * max(shares):.1f}%"


def _plot(traces: Sequence[Curves], figure: Any) -> None:
    """Coverage against reserved memory, a panel a trace; the large marks are the nominal knobs."""
    rows = 1 if len(traces) == 1 else 2
    panels = figure.subplots(rows, -(-len(traces) // rows), sharey=True, squeeze=False)
    for trace, axes in zip(traces, panels.flat, strict=True):
        for family in FAMILIES:
            points = sorted((o.reserved_of_oracle, 100 * o.coverage) for o in trace.outcomes[family.label])
            (line,) = axes.plot(*zip(*points, strict=True), ".-", markersize=3, linewidth=1, label=family.label)
            nominal = trace.nominal(family)
            axes.plot(nominal.reserved_of_oracle, 100 * nominal.coverage, "o", color=line.get_color())
        axes.axhline(95, color="grey", linestyle=":", linewidth=1)
        axes.set_title(trace.case, fontsize=9)
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("mean reservation / mean peak of the next 30 s")
    figure.supylabel("coverage, %")

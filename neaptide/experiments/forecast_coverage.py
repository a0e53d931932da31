"""How often a forecast of online KV demand holds, and how much memory it takes from offline work.

The demand is that of a recorded trace on a reference machine without queues: a request holds its prompt from its
arrival, prefills at ``PREFILL_TOKENS_PER_S``, then grows by a token each ``TICK_S`` and frees everything at its end. No
prefix is shared. One token stands for one block. Every second each forecast, which has seen the past only, says how
much to reserve; it is right if the most that is held in the next 30 s stays within.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neaptide.estimator.memory_forecast import (
    WARM_UP_ARRIVALS,
    ConformalForecast,
    MuSigmaForecast,
    QuantileForecast,
    WindowForecast,
)
from neaptide.experiments.result import ExperimentResult, Row
from neaptide.loadgen.traces import CHARS_PER_TOKEN, data_file, load_online, read_jsonl

NAME = "forecast-coverage"
ABOUT = "how often forecasts of online KV demand hold on the recorded traces, and what they reserve for it"

PREFILL_TOKENS_PER_S = 30_000
TICK_S = 0.025
CAPACITY_TOKENS = 400_000
SAMPLES_PER_S = 10
"""The forecasts see the most that was held in each tenth of a second, about as often as an engine plans a step."""
HORIZON_S = 30
QUICK_REPLAY_S = 700
AGENT_SESSIONS_PER_S = 0.09
"""A load of 0.4 on the reference machine, as the recommended speeds of the other traces give."""
AGENT_REPLAY_S = 1800
SEED = 0

Samples = NDArray[np.int64]
Requests = tuple[Sequence[float], Sequence[int], Sequence[int]]
"""Arrivals in seconds, sorted; input tokens; output tokens."""


@dataclass(slots=True, frozen=True)
class Case:
    label: str
    trace: str
    speed: float = 1.0
    max_input_tokens: int | None = None


CASES = (
    Case("azure_conv", "azure_conv_2023", 1.2),
    Case("azure_code", "azure_code_2023", 1.1),
    Case("mooncake_conversation", "mooncake_conversation", 0.40, 32_768),
    Case("mooncake_synthetic", "mooncake_synthetic", 0.42, 32_768),
    Case("servegen_r1", "servegen_r1_resampled", 1.6),
    Case("agents", "agent_miniswe"),
)


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
FAMILIES = (MU_SIGMA, QUANTILE, CONFORMAL)
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
    """Seconds judged: after the warm-up, with a whole horizon behind them."""
    mean_tokens: float
    oracle_tokens: float
    outcomes: dict[str, list[Outcome]]

    def nominal(self, family: Family) -> Outcome:
        return next(outcome for outcome in self.outcomes[family.label] if outcome.knob == family.nominal)

    def coverage_at(self, family: Family, reserved_of_oracle: float) -> float:
        """On the curve between the knobs tried; beyond its ends that of the end: a quantile never asks for more."""
        points = sorted((outcome.reserved_of_oracle, outcome.coverage) for outcome in self.outcomes[family.label])
        return float(np.interp(reserved_of_oracle, [x for x, _ in points], [y for _, y in points]))


def demand_tokens(requests: Requests) -> Samples:
    """KV tokens held in each tick, from time 0 to the last arrival."""
    arrivals_s, inputs, outputs = requests
    start = np.floor(np.array(arrivals_s) / TICK_S + 1e-9).astype(np.int64)
    tokens_in, tokens_out = np.array(inputs), np.array(outputs)
    decode = start + np.ceil(tokens_in / (PREFILL_TOKENS_PER_S * TICK_S)).astype(np.int64)
    end = decode + tokens_out
    level, slope = np.zeros((2, int(end.max()) + 1), np.int64)
    np.add.at(level, start, tokens_in)
    np.add.at(level, end, -(tokens_in + tokens_out))
    np.add.at(slope, decode, 1)
    np.add.at(slope, end, -1)
    held: Samples = np.cumsum(level + np.cumsum(slope))
    return held[: int(start.max()) + 1]


def agent_requests(replay_s: float, seed: int) -> Requests:
    """Those of the recorded sessions in turn, started by a Poisson process; no call before the answer
    of the session's last."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for row in read_jsonl(data_file("online", "agent_miniswe.jsonl.gz")):
        sessions.setdefault(row["session"], []).append(row)
    recorded = list(sessions.values())
    rng = np.random.default_rng(seed)
    gaps_s = rng.exponential(1 / AGENT_SESSIONS_PER_S, int(2 * replay_s * AGENT_SESSIONS_PER_S) + 10)
    calls = []
    for number, start_s in enumerate(np.cumsum(gaps_s)):
        answered_s = 0.0
        for row in recorded[number % len(recorded)]:
            tokens_in, tokens_out = (
                row["input_chars"] // CHARS_PER_TOKEN,
                max(1, row["output_chars"] // CHARS_PER_TOKEN),
            )
            arrival_s = max(start_s + row["offset_ms"] / 1000, answered_s)
            answered_s = arrival_s + tokens_in / PREFILL_TOKENS_PER_S + tokens_out * TICK_S
            if arrival_s < replay_s:
                calls.append((float(arrival_s), tokens_in, tokens_out))
    arrivals_s, inputs, outputs = zip(*sorted(calls), strict=True)
    return arrivals_s, inputs, outputs


def requests_of(case: Case, quick: bool) -> Requests:
    """With ``quick`` the first ``QUICK_REPLAY_S`` of the replay."""
    if case.trace == "agent_miniswe":
        return agent_requests(QUICK_REPLAY_S if quick else AGENT_REPLAY_S, SEED)
    window_s = (0.0, QUICK_REPLAY_S * case.speed) if quick else None
    requests = load_online(case.trace, window_s=window_s, speed=case.speed, max_input_tokens=case.max_input_tokens)
    return (
        [request.arrival_s for request in requests],
        [request.input_tokens for request in requests],
        [request.output_tokens for request in requests],
    )


def reservations(forecast: WindowForecast, samples: Samples, arrivals_s: Sequence[float]) -> Samples:
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
    """All forecasts with all knobs on one trace. It needs more requests than the warm-up, and some minutes."""
    arrivals_s = requests[0]
    held = demand_tokens(requests)
    ticks = round(1 / TICK_S)
    seconds = len(held) // ticks
    samples = held[: seconds * ticks].reshape(seconds, SAMPLES_PER_S, -1).max(axis=2)
    horizons = np.lib.stride_tricks.sliding_window_view(samples.reshape(-1), HORIZON_S * SAMPLES_PER_S)[::SAMPLES_PER_S]
    first = max(int(arrivals_s[WARM_UP_ARRIVALS - 1]), HORIZON_S) + 1
    horizons, peaks = horizons[first:], horizons[first:].max(axis=1)
    mean_tokens, oracle_tokens = float(samples[first:].mean()), float(peaks.mean())

    def judge(family: Family, knob: float) -> Outcome:
        reserved = reservations(family.make(knob), samples, arrivals_s)[first : first + len(peaks)]
        return Outcome(
            knob,
            float((peaks <= reserved).mean()),
            float((horizons <= reserved[:, None]).mean()),
            float(reserved.mean()) / oracle_tokens,
            float(reserved.mean()) / mean_tokens,
        )

    outcomes = {family.label: [judge(family, knob) for knob in family.knobs] for family in FAMILIES}
    return Curves(label, len(peaks), mean_tokens, oracle_tokens, outcomes)


def run(quick: bool) -> ExperimentResult:
    traces = [measure(case.label, requests_of(case, quick)) for case in CASES]
    rows = [row for trace in traces for row in _trace_rows(trace)] + _mean_rows(traces)
    data = {"quick": quick, "capacity_tokens": CAPACITY_TOKENS, "traces": [asdict(trace) for trace in traces]}
    return ExperimentResult(NAME, rows, _notes(traces, quick), data, lambda figure: _plot(traces, figure))


def _trace_rows(trace: Curves) -> list[Row]:
    published = trace.nominal(MU_SIGMA)
    rows = [
        _coverage_row(f"{trace.case}: mu + 2 sigma, moments of the next 30 s", published.momentary_coverage, CLAIMED),
        _coverage_row(f"{trace.case}: mu + 2 sigma, {_price(published)}", published.coverage, CLAIMED),
    ]
    for family in (QUANTILE, CONFORMAL):
        nominal = trace.nominal(family)
        rows.append(_coverage_row(f"{trace.case}: {family.label} 95%, {_price(nominal)}", nominal.coverage))
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


def _mean_rows(traces: Sequence[Curves]) -> list[Row]:
    return [
        _coverage_row(f"mean: {family.label}, reserving as {name}", _mean_coverage_at(traces, family, reference))
        for reference, name in ((CONFORMAL, "conformal 95%"), (MU_SIGMA, "mu + 2 sigma"))
        for family in FAMILIES
    ]


def _coverage_row(case: str, coverage: float, paper: float | None = None) -> Row:
    return Row(case, 100 * coverage, paper, unit="%", digits=1)


def _price(outcome: Outcome) -> str:
    return f"reserves {outcome.reserved_of_oracle:.2f} of oracle, {outcome.reserved_of_demand:.2f} of demand"


def _mean_coverage_at(traces: Sequence[Curves], family: Family, reference: Family) -> float:
    """Coverage where every trace's mean reservation is that of the reference with its nominal knob."""
    return float(np.mean([t.coverage_at(family, t.nominal(reference).reserved_of_oracle) for t in traces]))


def _k_for_95(trace: Curves) -> str:
    """The k with which mu + k sigma would have covered 95% of the peaks, known only afterwards."""
    outcomes = trace.outcomes[MU_SIGMA.label]
    if outcomes[-1].coverage < 0.95:
        return f"over {outcomes[-1].knob:.0f} ({trace.case})"
    return f"{np.interp(0.95, [o.coverage for o in outcomes], [o.knob for o in outcomes]):.1f} ({trace.case})"


def _notes(traces: Sequence[Curves], quick: bool) -> list[str]:
    published = [trace.nominal(MU_SIGMA) for trace in traces]
    conformal = [trace.nominal(CONFORMAL) for trace in traces]
    means = {family.label: _mean_coverage_at(traces, family, CONFORMAL) for family in FAMILIES}
    beaten = [
        f"{family.label} on {trace.case}"
        for trace, nominal in zip(traces, conformal, strict=True)
        for family in (MU_SIGMA, QUANTILE)
        if trace.coverage_at(family, nominal.reserved_of_oracle) > nominal.coverage
    ]
    independent = [trace.seconds // HORIZON_S for trace in traces]
    notes = [
        "Coverage: share of seconds at which the most held in the next 30 s is within the reservation. The oracle "
        "reserves exactly that peak.",
        f"mu + 2 sigma covers {_span([o.momentary_coverage for o in published])} of the moments, which is how we read "
        f"Echo's 95%, but only {_span([o.coverage for o in published])} of the peaks that offline work must make "
        "room for.",
        f"To cover 95% of the peaks k would have to be {', '.join(_k_for_95(trace) for trace in traces)}.",
        f"conformal with alpha 0.05 covers {_span([o.coverage for o in conformal])} of the peaks.",
        "At equal reservation, that of conformal 95%, mean coverage over the traces: "
        + ", ".join(f"{label} {100 * mean:.1f}%" for label, mean in means.items())
        + f". The default by this measure: {max(means, key=lambda label: means[label])}.",
        f"At that reservation conformal is beaten by: {', '.join(beaten) or 'none'}.",
        f"A replay has {min(independent)} to {max(independent)} horizons that do not overlap: a difference of two or "
        "three points on one trace means little.",
        "Knobs at equal reservation are interpolated between those tried. The fixed settings of conformal (gain, "
        "weight of the present) were picked on these traces; of the agents the starts of sessions are drawn.",
    ]
    return (
        [*notes, f"Quick: the first {QUICK_REPLAY_S} s of each replay, less than the forecasts' window."]
        if quick
        else notes
    )


def _span(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.1f} to {100 * max(shares):.1f}%"


def _plot(traces: Sequence[Curves], figure: Any) -> None:
    """Coverage against reserved memory, a panel a trace; the large marks are the nominal knobs."""
    panels = figure.subplots(2, 3, sharey=True)
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

"""Ours against ``fcfs`` and ``priority`` as an oracle would tune them: step tokens and seats swept on every trace.

A static limit on step tokens, tuned for one load, is a strong rival. So two comparisons: with each rival's best point
of every trace, and with the one setting that is best over all of them, which is what an operator could have chosen.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import msgspec

from neaptide.estimator.device_profile import load_profile
from neaptide.experiments.result import ExperimentResult, Row
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import online_requests
from neaptide.loadgen.workloads.traces import delayed
from neaptide.simulation.measures import OutOfReach
from neaptide.simulation.points import PolicyPoint
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate

NAME = "tuned-rivals"
ABOUT = "offline tokens/s against fcfs and priority at the step tokens and seats that suit each trace best"

PROFILE = "h100-80g-llama-3.1-8b"
OURS = PolicyPoint("neaptide")
RIVALS = ("priority", "fcfs")
STEP_TOKENS = (512, 1024, 1536, 2048, 4096, 8192)
SEATS = (128, 256, 1024)
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.05
STEP_NOISE = 0.05
CLIENT_LIMIT_TOKENS = 1024
"""``max_tokens`` of every request."""
OFFLINE_REQUESTS = 4000
"""Submitted at once; more follow before they run out."""
CONCEDED = 0.01
"""A rival's point counts if its attainment is at most so far below ours."""
LEAST_RATIO = {"best point": 1.0, "one setting": 1.15}
"""What ours must reach in offline tokens/s: on every trace, and in the geometric mean over all."""


@dataclass(slots=True, frozen=True)
class Load:
    """An online trace beside an offline set."""

    trace: str
    window_s: tuple[float, float]
    """Of the trace."""
    speed: float
    offline: str
    context_tokens: int = 16_384
    warm_up_s: float = 30.0
    """So long offline work runs before the first online request, which opens the window: until about as many rows end
    as begin. A policy that is still filling the cache computes prompts, and looks fast."""
    mixed_with: tuple["Load", ...] = ()
    """Their online requests come as well."""
    name: str = ""
    """The trace's unless given."""

    @property
    def title(self) -> str:
        return self.name or self.trace


CONV = Load("azure_conv_2023", (600.0, 660.0), 1.2, "sharegpt_lengths")
LOADS = (
    CONV,
    Load("azure_code_2023", (1133.0, 1193.0), 1.1, "loogle-qa-short"),
    Load("mooncake_conversation", (600.0, 624.0), 0.4, "sharegpt_lengths", 32_768),
    Load("servegen_r1_resampled", (600.0, 660.0), 1.6, "sharegpt_lengths"),
)
"""Chats, bursts of code completions with few tokens of output, long contexts, answers of a reasoning model."""
MOVING = (
    Load("echo-day@0.01", (14_400.0, 50_400.0), 360.0, "sharegpt_lengths", name="day curve"),
    Load("echo-day@2", (46_770.0, 46_830.0), 1.0, "sharegpt_lengths", name="burst"),
    replace(
        CONV,
        speed=0.6,
        context_tokens=32_768,
        mixed_with=(replace(LOADS[1], speed=0.6), replace(LOADS[2], speed=0.24)),
        name="mixed lengths",
    ),
)
"""From the trough to the peak of a made day, ten hours in 100 s; half a minute of the peak, then half a minute at twice
of it; chats, code completions and long contexts at once."""


@dataclass(slots=True, frozen=True)
class Size:
    loads: tuple[Load, ...]
    step_tokens: tuple[int, ...]
    seats: tuple[int, ...]


FULL = Size((*LOADS, *MOVING), STEP_TOKENS, SEATS)
QUICK = Size(
    (replace(CONV, window_s=(600.0, 610.0), offline="batchllm-2000-200-s4", warm_up_s=10.0),),
    STEP_TOKENS[::2],
    SEATS[:2],
)
"""Rows of 100 output tokens, which come and go soon."""


@dataclass(slots=True, frozen=True)
class Point:
    """A policy with its limits, on one trace."""

    point: PolicyPoint
    result: SimResult

    @property
    def attained(self) -> float:
        return self.result.online.attainment["both"] or 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.result.offline.tokens_per_s or 0.0

    def __str__(self) -> str:
        return f"{self.point}, {100 * self.attained:.1f}%"


@dataclass(slots=True, frozen=True)
class TraceRuns:
    ours: Point
    alone: Point
    """Ours without offline work."""
    rivals: dict[str, list[Point]]
    """Those that were run to their end ..."""
    out_of_reach: dict[str, dict[str, str]] = field(default_factory=dict)
    """... and those that were given up, with the reason, by rival and point."""

    def keeping_up(self, rival: str) -> list[Point]:
        """Points of the rival that attain about as much as ours."""
        return [point for point in self.rivals[rival] if point.attained >= self.ours.attained - CONCEDED]

    def best(self, rival: str) -> Point | None:
        """What an oracle would choose here."""
        return max(self.keeping_up(rival), key=lambda point: point.tokens_per_s, default=None)


Runs = dict[str, TraceRuns]
"""By trace."""


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    runs = {load.title: _trace_runs(load, size) for load in size.loads}
    rows = [row for rival in RIVALS for row in _rows(rival, runs, judged=not quick)]
    rows += [
        Row(
            f"{trace}: of the bound in the long run",
            100 * (one.ours.result.offline.share_of_bound or 0.0),
            unit="%",
            digits=1,
        )
        for trace, one in runs.items()
    ]
    data = {
        "settings": {
            "profile": PROFILE,
            "loads": msgspec.to_builtins(size.loads),
            "step_tokens": list(size.step_tokens),
            "seats": list(size.seats),
            "conceded": CONCEDED,
        },
        "runs": {trace: _trace_data(one) for trace, one in runs.items()},
        "out_of_reach": {trace: one.out_of_reach for trace, one in runs.items()},
    }
    return ExperimentResult(
        NAME, rows, _notes(runs), data, lambda figure: _plot(figure, runs), against="rival, offline tok/s"
    )


# ---- the runs -----------------------------------------------------------------------------------------------


def settings(policy: str, step_tokens: Sequence[int], seats: Sequence[int]) -> list[PolicyPoint]:
    """What a rival may be tuned to: vLLM refuses fewer step tokens than seats."""
    return [PolicyPoint(policy, tokens, most) for tokens, most in product(step_tokens, seats) if tokens >= most]


def _trace_runs(load: Load, size: Size) -> TraceRuns:
    both = scenario_of(load)
    runs = TraceRuns(
        ours=_point(load, OURS, both),
        alone=_point(load, OURS, replace(both, offline=())),
        rivals={rival: [] for rival in RIVALS},
        out_of_reach={rival: {} for rival in RIVALS},
    )
    for rival in RIVALS:
        for point in settings(rival, size.step_tokens, size.seats):
            try:
                runs.rivals[rival].append(_point(load, point, both, runs.ours.attained - CONCEDED))
            except OutOfReach as error:
                runs.out_of_reach[rival][str(point)] = str(error)
    return runs


def scenario_of(load: Load) -> Scenario:
    """Both kinds of work, under our policy."""
    online = [
        request
        for each in (load, *load.mixed_with)
        for request in online_requests(each.trace, window_s=each.window_s, speed=each.speed)
    ]
    trace = sorted(online, key=lambda request: request.arrival_s)
    return Scenario(
        profile=load_profile(PROFILE),
        online=delayed(trace, load.warm_up_s),
        offline=[load_offline(load.offline, seed=0, limit=OFFLINE_REQUESTS)],
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        step_noise=STEP_NOISE,
        max_model_len=load.context_tokens,
        max_output_tokens=CLIENT_LIMIT_TOKENS,
        # Enough for all that can still attain: no answer takes longer in time.
        drain_s=TTFT_SLO_S + CLIENT_LIMIT_TOKENS * TPOT_SLO_S,
    )


def _point(load: Load, point: PolicyPoint, scenario: Scenario, least_attainment: float = 0.0) -> Point:
    logging.getLogger(__name__).info("%s on %s%s", point, load.title, "" if scenario.offline else ", online alone")
    return Point(point, simulate(point.of(scenario), least_attainment=least_attainment).result)


# ---- what it says -------------------------------------------------------------------------------------------


def one_setting(rival: str, runs: Runs) -> PolicyPoint | None:
    """The setting that keeps up with ours on the most traces, and is the fastest there; None if all miss everywhere."""

    def worth(point: PolicyPoint) -> tuple[int, float]:
        kept = list(_kept_by(rival, point, runs).values())
        return len(kept), geometric_mean([each.tokens_per_s for each in kept])

    points = {each.point for one in runs.values() for each in one.keeping_up(rival)}
    return max(sorted(points, key=str), key=worth, default=None)


def _kept_by(rival: str, point: PolicyPoint, runs: Runs) -> dict[str, Point]:
    """The traces on which it keeps up with ours."""
    return {trace: each for trace, one in runs.items() for each in one.keeping_up(rival) if each.point == point}


def geometric_mean(values: Sequence[float]) -> float:
    return math.prod(values) ** (1.0 / len(values))


def _rows(rival: str, runs: Runs, *, judged: bool) -> list[Row]:
    rows = []
    for trace, one in runs.items():
        best = one.best(rival)
        name = f"{trace}: best point of {rival}"
        if best is None:
            rows.append(Row(f"{name} (none keeps up)", one.ours.tokens_per_s, unit="tok/s", digits=0))
        else:
            rows.append(_row(f"{name} ({best})", one.ours, best, "best point" if judged else None))
    setting = one_setting(rival, runs)
    return [*rows, *rows_of_one_setting(rival, setting, runs, judged=judged)] if setting and len(runs) > 1 else rows


def rows_of_one_setting(rival: str, setting: PolicyPoint, runs: Runs, *, judged: bool) -> list[Row]:
    """Where it misses the targets there is nothing to compare."""
    kept = _kept_by(rival, setting, runs)
    rows = [
        _row(f"{trace}: {kept[trace]}", one.ours, kept[trace], None)
        if trace in kept
        else Row(f"{trace}: {setting} (does not keep up)", one.ours.tokens_per_s, unit="tok/s", digits=0)
        for trace, one in runs.items()
    ]
    ours = geometric_mean([runs[trace].ours.tokens_per_s for trace in kept])
    theirs = geometric_mean([other.tokens_per_s for other in kept.values()])
    holds = ours >= LEAST_RATIO["one setting"] * theirs if judged else None
    case = f"{setting} on {len(kept)} of {len(runs)} traces, geometric mean"
    return [*rows, Row(case, ours, theirs, "tok/s", digits=0, holds=holds)]


def _row(case: str, ours: Point, other: Point, bar: str | None) -> Row:
    holds = None if bar is None else ours.tokens_per_s >= LEAST_RATIO[bar] * other.tokens_per_s
    return Row(case, ours.tokens_per_s, other.tokens_per_s, "tok/s", digits=0, holds=holds)


def _notes(runs: Runs) -> list[str]:
    lines = [
        f"{trace}: neaptide attains both targets for {100 * one.ours.attained:.1f}% ({100 * one.alone.attained:.1f}% "
        f"alone) at {one.ours.tokens_per_s:,.0f} offline tok/s; {_kept(one)}."
        for trace, one in runs.items()
    ]
    trades = [f"{trace}, {name}: {_trade(point.result)}." for trace, one in runs.items() for name, point in _shown(one)]
    return [
        *lines,
        *trades,
        f"{PROFILE}, steps with {STEP_NOISE:.0%} noise, planning time charged, TTFT {TTFT_SLO_S:g} s, TPOT "
        f"{1e3 * TPOT_SLO_S:g} ms, max_tokens {CLIENT_LIMIT_TOKENS:,}; context by trace (data.settings). neaptide has "
        f"2,048 tokens and 256 seats everywhere; percentages are attainment of both targets.",
        f"A rival's point counts if it attains at most {100 * CONCEDED:g} point less than ours; a run ends when it no "
        "longer can (data.out_of_reach). Fewer step tokens than seats are left out: vLLM refuses them.",
        "The bound knows all lengths and arrivals (docs/simulation.md); how much of it can be had, no one has shown. A "
        "policy that misses targets, as fcfs does, or fills its cache in the window may pass it.",
        "What tokens/s were bought with is in data.runs for every other point.",
    ]


def _shown(one: TraceRuns) -> list[tuple[str, Point]]:
    best = [(str(point.point), point) for rival in RIVALS if (point := one.best(rival)) is not None]
    return [("online alone", one.alone), (str(one.ours.point), one.ours), *best]


def _trade(result: SimResult) -> str:
    """What the tokens/s were bought with."""
    online, preemptions = result.online, result.preemptions
    latencies = [
        f"{name} {' / '.join(_ms(values[q]) for q in ('p50', 'p99'))} ms"
        for name, values in (("TTFT", online.ttft_s), ("TPOT", online.tpot_s), ("gaps", online.itl_s))
    ]
    by_class = preemptions.count_by_class
    return (
        f"{', '.join(latencies)} (p50 / p99), {100 * (online.attainment['both_from_arrival'] or 0.0):.1f}% "
        f"from arrival, {by_class['online']} online and {by_class['offline']} offline preemptions, "
        f"{preemptions.recomputed_tokens:,} tokens dropped and {result.wasted_tokens:,} computed again, longest wait "
        f"{result.offline.longest_wait_s or 0.0:.0f} s"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f}"


def _kept(one: TraceRuns) -> str:
    counts = (
        (len(one.keeping_up(rival)), len(one.rivals[rival]) + len(one.out_of_reach[rival]), rival) for rival in RIVALS
    )
    return ", ".join(f"{kept} of {count} points of {rival} keep up" for kept, count, rival in counts)


def _trace_data(one: TraceRuns) -> dict[str, Any]:
    points = [one.ours, *(point for rival in RIVALS for point in one.rivals[rival])]
    named = {str(point.point): point.result for point in points} | {"online alone": one.alone.result}
    return {name: msgspec.to_builtins(result) for name, result in named.items()}


def _plot(figure: Any, runs: Runs) -> None:
    for axes, (trace, one) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        for rival, marker in zip(RIVALS, "ox", strict=True):
            points = one.rivals[rival]
            attained = [100 * point.attained for point in points]
            axes.plot(attained, [point.tokens_per_s for point in points], marker, label=rival)
        axes.plot([100 * one.ours.attained], [one.ours.tokens_per_s], "*", markersize=14, label="neaptide")
        axes.axhline(
            one.ours.result.offline.bound_tokens_per_s["long_run"], linestyle="--", color="grey", label="bound"
        )
        axes.axvline(100 * (one.ours.attained - CONCEDED), linestyle=":", color="grey")
        axes.set(title=trace, xlabel="attained TTFT and TPOT, %", ylabel="offline tokens/s")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend()

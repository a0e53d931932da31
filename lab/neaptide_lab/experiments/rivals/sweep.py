"""Ours against rivals as an oracle would tune them: step tokens and seats swept on every trace.

The rivals are vLLM's ``fcfs`` and ``priority``, and two that know deadlines: ``slidingserve`` and ``qoserve``. The
latter are swept over what their authors tune as well.

A static limit on step tokens, tuned for one load, is a strong rival. So two comparisons: with each rival's best point
of every trace, and with the one setting that is best over all of them, which is what an operator could have chosen.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import msgspec

from neaptide.simulation.explain import StepLimits
from neaptide.simulation.measures import OutOfReach
from neaptide.simulation.points import PolicyPoint
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.limits.attainment import attainment_bound
from neaptide_lab.experiments.price import price
from neaptide_lab.experiments.result import ExperimentResult, Row
from neaptide_lab.experiments.rivals.kept import OUR_CODE, KeptRuns, code_digest
from neaptide_lab.experiments.rivals.loads import (
    CLIENT_LIMIT_TOKENS,
    CONV,
    LOADS,
    MOVING,
    PROFILE,
    STEP_NOISE,
    TPOT_SLO_S,
    TTFT_SLO_S,
    Load,
    scenario_of,
)

NAME = "tuned-rivals"
ABOUT = "offline tokens/s against fcfs, priority, slidingserve and qoserve at the settings that suit each trace best"

OURS = PolicyPoint("neaptide")
"""At its defaults, and with the plan of the pool that a server makes on a GPU."""
VLLM = ("priority", "fcfs")
"""Rivals that are swept over step tokens and seats."""
_SLIDING, _QOS = "neaptide_lab.policies.slidingserve", "neaptide_lab.policies.qoserve"
DEADLINE_AWARE = {
    "slidingserve": ("slidingserve", f"{_SLIDING}:SlidingServePaced"),
    "qoserve": ("qoserve", f"{_QOS}:QoServeAlpha1", f"{_QOS}:QoServePaced", f"{_QOS}:QoServePacedAlpha1"),
}
"""Rivals that know deadlines, with their settings: QoServe's alpha, and from when both count token deadlines. They have
few points over step tokens, because they size each chunk themselves."""
RIVALS = (*VLLM, *DEADLINE_AWARE)
_RIVAL_OF = {policy: rival for rival, policies in DEADLINE_AWARE.items() for policy in policies}
STEP_TOKENS = (512, 1024, 1536, 2048, 4096, 8192)
SEATS = (128, 256, 1024)
LONG_STEP_TOKENS = (2048, 8192)
"""Step tokens of the rivals that know deadlines; 256 seats."""
LIKELY = (
    *(PolicyPoint("priority", *limits) for limits in ((1024, 256), (512, 256), (1536, 256), (1024, 128), (2048, 128))),
    PolicyPoint(f"{_SLIDING}:SlidingServePaced", 2048, 256),
    PolicyPoint(f"{_QOS}:QoServePaced", 2048, 256),
)
"""Those that did best in earlier sweeps, or may: they are run on every trace before the others are on any."""
CONCEDED = 0.01
"""A rival's point counts if its attainment is at most so far below ours."""
DECIDING = ("experiments/rivals/loads.py",)
"""What of the experiment decides what a simulation gives."""
LEAST_RATIO = {"best point": 1.0, "one setting": 1.15}
"""What ours must reach in offline tokens/s: on every trace, and in the geometric mean over all."""


@dataclass(slots=True, frozen=True)
class Size:
    loads: tuple[Load, ...]
    step_tokens: tuple[int, ...]
    seats: tuple[int, ...]
    deadline_aware: tuple[PolicyPoint, ...] = ()
    """Points of the rivals that know deadlines."""
    only: tuple[PolicyPoint, ...] | None = None
    """The rivals' points to run; None: all of them."""


def deadline_aware(step_tokens: Sequence[int], seats: int = 256) -> tuple[PolicyPoint, ...]:
    """Every setting of the rivals that know deadlines, at each number of step tokens."""
    return tuple(PolicyPoint(policy, tokens, seats) for policy, tokens in product(_RIVAL_OF, step_tokens))


FULL = Size((*LOADS, *MOVING), STEP_TOKENS, SEATS, deadline_aware(LONG_STEP_TOKENS))
ONLY_LIKELY = replace(FULL, only=LIKELY)
QUICK = Size(
    (replace(CONV, window_s=(600.0, 610.0), offline="batchllm-2000-200-s4", warm_up_s=10.0),),
    STEP_TOKENS[::2],
    SEATS[:2],
    deadline_aware(LONG_STEP_TOKENS[:1]),
)
"""Rows of 100 output tokens, which come and go soon."""


@dataclass(slots=True, frozen=True)
class Point:
    """A policy with its limits, on one trace."""

    point: PolicyPoint
    result: SimResult

    @property
    def attained(self) -> float:
        return self.result.attained

    @property
    def tokens_per_s(self) -> float:
        return self.result.offline_tokens_per_s

    def __str__(self) -> str:
        return f"{self.point}, {100 * self.attained:.1f}%"


@dataclass(slots=True, frozen=True)
class TraceRuns:
    ours: Point
    alone: Point
    """Ours without offline work."""
    rivals: dict[str, list[Point]]
    """Points that ran to their end."""
    out_of_reach: dict[str, dict[str, str]] = field(default_factory=dict)
    """Points that were stopped, with the reason, by rival and point."""

    def keeping_up(self, rival: str) -> list[Point]:
        """Points of the rival that attain about as much as ours."""
        return [point for point in self.rivals[rival] if point.attained >= self.ours.attained - CONCEDED]

    def was_run(self, rival: str) -> bool:
        return bool(self.rivals[rival] or self.out_of_reach[rival])

    def best(self, rival: str) -> Point | None:
        """What an oracle would choose here."""
        return max(self.keeping_up(rival), key=lambda point: point.tokens_per_s, default=None)


Runs = dict[str, TraceRuns]
"""By trace."""


def run(quick: bool) -> ExperimentResult:
    return run_kept(quick, KeptRuns(SimResult))


def run_kept(quick: bool, kept: KeptRuns[SimResult], *, only_likely: bool = False) -> ExperimentResult:
    """``run``, which goes on from the simulations that were kept and keeps those that it runs.

    only_likely: the full form without the points of which little is expected.
    """
    size = QUICK if quick else ONLY_LIKELY if only_likely else FULL
    sweep = _Sweep(kept)
    runs = sweep.run(size)
    short = {load.title: sweep.limits(load) for load in size.loads if falls_short(runs[load.title])}
    rows = [row for rival in RIVALS for row in _rows(rival, runs, judged=not quick)]
    rows += [
        Row(
            f"{trace}: of what no policy could exceed",
            100 * (one.ours.result.offline.share_of_bound or 0.0),
            unit="%",
            digits=1,
        )
        for trace, one in runs.items()
    ]
    bounds = {load.title: sweep.attainment_bound(load) for load in size.loads}
    rows += [
        Row(f"{trace}: attained, and what a clairvoyant could", 100 * one.ours.attained, 100 * bounds[trace], "%", 1)
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
        "attainment_bound": bounds,
    }
    return ExperimentResult(
        NAME, rows, _notes(runs, short), data, lambda figure: _plot(figure, runs), against="rival, offline tok/s"
    )


# ---- the runs -----------------------------------------------------------------------------------------------


def settings(policy: str, step_tokens: Sequence[int], seats: Sequence[int]) -> list[PolicyPoint]:
    """The settings of a rival: vLLM refuses fewer step tokens than slots."""
    return [PolicyPoint(policy, tokens, most) for tokens, most in product(step_tokens, seats) if tokens >= most]


def rival_of(point: PolicyPoint) -> str:
    """The rival whose setting the point is."""
    return _RIVAL_OF.get(point.policy, point.policy)


def in_turn(size: Size) -> Iterator[tuple[Load, PolicyPoint]]:
    """Every rival's points on every load, those first of which most is expected."""
    points = [point for rival in VLLM for point in settings(rival, size.step_tokens, size.seats)]
    points += size.deadline_aware
    first = [point for point in LIKELY if point in points]
    yield from product(size.loads, first)
    if size.only is not None:
        return
    for rival in RIVALS:
        yield from product(size.loads, (point for point in points if rival_of(point) == rival and point not in first))


class _Sweep:
    """Runs what has not been kept."""

    def __init__(self, kept: KeptRuns[SimResult]) -> None:
        self._kept = kept
        self._our_code, self._rivals_code = code_digest(DECIDING), code_digest(DECIDING, besides=OUR_CODE)
        self._scenarios: dict[str, Scenario] = {}

    def run(self, size: Size) -> Runs:
        runs = {
            load.title: TraceRuns(
                ours=self._point(load, OURS),
                alone=self._point(load, OURS, alone=True),
                rivals={rival: [] for rival in RIVALS},
                out_of_reach={rival: {} for rival in RIVALS},
            )
            for load in size.loads
        }
        for load, point in in_turn(size):
            one = runs[load.title]
            try:
                one.rivals[rival_of(point)].append(self._point(load, point, one.ours.attained - CONCEDED))
            except OutOfReach as error:
                one.out_of_reach[rival_of(point)][str(point)] = str(error)
        return runs

    def _point(self, load: Load, point: PolicyPoint, least_attainment: float = 0.0, *, alone: bool = False) -> Point:
        name = f"{point} on {load.title}{', online alone' if alone else ''}"
        is_planned = point == OURS and not alone
        if is_planned:
            name += ", planned as in a server"
        code = self._our_code if point == OURS else self._rivals_code

        def simulated() -> SimResult:
            logging.getLogger(__name__).info("%s", name)
            scenario = self._scenario(load)
            scenario = replace(scenario, offline=()) if alone else scenario
            scenario = scenario.planned_as_served() if is_planned else scenario
            scenario = replace(point.of(scenario), with_bounds=point == OURS)
            return simulate(scenario, least_attainment=least_attainment).result

        return Point(point, self._kept.run(f"{name}: {load}", code, least_attainment, simulated))

    def limits(self, load: Load) -> str:
        """What bounded our steps, in a run of its own."""
        scenario = self._scenario(load)
        window_s = (scenario.online[0].arrival_s, scenario.online[-1].arrival_s)
        limits = StepLimits(window_s)
        simulate(OURS.of(scenario).planned_as_served(), observers=[limits])
        return str(limits)

    def attainment_bound(self, load: Load) -> float:
        """Largest attainment of any policy on the load's mean step times."""
        bound = attainment_bound(self._scenario(load))
        assert bound is not None
        return bound

    def _scenario(self, load: Load) -> Scenario:
        if load.title not in self._scenarios:
            self._scenarios[load.title] = scenario_of(load)
        return self._scenarios[load.title]


# ---- what it says -------------------------------------------------------------------------------------------


def falls_short(one: TraceRuns) -> bool:
    """Whether the best point of a rival is faster than ours."""
    bests = [best for rival in RIVALS if (best := one.best(rival)) is not None]
    return any(best.tokens_per_s > one.ours.tokens_per_s for best in bests)


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
        if not one.was_run(rival):
            continue  # none of its points was likely
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


def _notes(runs: Runs, short: dict[str, str]) -> list[str]:
    """``short``: what bounded the steps on the traces on which a rival is faster."""
    lines = [
        f"{trace}: neaptide attains both targets for {100 * one.ours.attained:.1f}% ({100 * one.alone.attained:.1f}% "
        f"alone) at {one.ours.tokens_per_s:,.0f} offline tok/s; {_kept(one)}."
        for trace, one in runs.items()
    ]
    prices = [f"{trace}, {name}: {price(point.result)}." for trace, one in runs.items() for name, point in _shown(one)]
    return [
        *lines,
        *prices,
        *[
            f"{trace}: a rival is faster. What ended the offline work of our steps: {why}."
            for trace, why in short.items()
        ],
        f"{PROFILE}, steps with {STEP_NOISE:.0%} noise, planning time charged, TTFT {TTFT_SLO_S:g} s, TPOT "
        f"{1e3 * TPOT_SLO_S:g} ms, max_tokens {CLIENT_LIMIT_TOKENS:,}; context by trace (data.settings). neaptide has "
        "2,048 tokens and 256 seats everywhere, and the plan of the pool that a server makes on a GPU, told of no "
        "answer before it has ended; percentages are attainment of both targets.",
        f"A rival's point counts if it attains at most {100 * CONCEDED:g} point less than ours; a run ends when it no "
        "longer can (data.out_of_reach). Fewer step tokens than seats are left out: vLLM refuses them.",
        "The bound knows all lengths and arrivals (docs/simulation.md); how much of it can be had, no one has shown. "
        "It is beside the requests that ours had in time.",
        "Windows are of 200 s: in a minute, what stands in the cache when it opens may be worth more than a policy "
        "(lab/notebook/experiments.md).",
        "What tokens/s were bought with is in data.runs for every other point.",
    ]


def _shown(one: TraceRuns) -> list[tuple[str, Point]]:
    best = [(str(point.point), point) for rival in RIVALS if (point := one.best(rival)) is not None]
    return [("online alone", one.alone), (str(one.ours.point), one.ours), *best]


def _kept(one: TraceRuns) -> str:
    counts = (
        (len(one.keeping_up(rival)), len(one.rivals[rival]) + len(one.out_of_reach[rival]), rival)
        for rival in RIVALS
        if one.was_run(rival)
    )
    return ", ".join(f"{kept} of {count} points of {rival} keep up" for kept, count, rival in counts)


def _trace_data(one: TraceRuns) -> dict[str, Any]:
    points = [one.ours, *(point for rival in RIVALS for point in one.rivals[rival])]
    named = {str(point.point): point.result for point in points} | {"online alone": one.alone.result}
    return {name: msgspec.to_builtins(result) for name, result in named.items()}


def _plot(figure: Any, runs: Runs) -> None:
    for axes, (trace, one) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        for rival, marker in zip(RIVALS, "oxs^", strict=True):
            points = one.rivals[rival]
            attained = [100 * point.attained for point in points]
            axes.plot(attained, [point.tokens_per_s for point in points], marker, label=rival)
        axes.plot([100 * one.ours.attained], [one.ours.tokens_per_s], "*", markersize=14, label="neaptide")
        axes.axhline(one.ours.result.offline.bound_tokens_per_s["in_time"], linestyle="--", color="grey", label="bound")
        axes.axvline(100 * (one.ours.attained - CONCEDED), linestyle=":", color="grey")
        axes.set(title=trace, xlabel="attained TTFT and TPOT, %", ylabel="offline tokens/s")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend()

"""What forecasts of online memory demand cost offline work, and what they spare it.

Memory that is kept for online work lies idle until it comes; memory that is not kept is taken from offline requests,
which compute again. A forecast that covers every peak may so be dearer than one that misses some.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.estimator.recipes import DEFAULT_HEADROOM
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.result import ExperimentResult, Row
from neaptide_lab.experiments.rivals.loads import LOADS, PROFILE, STEP_NOISE, Load, scenario_of

NAME = "headroom"
ABOUT = "what fixed reservations and forecasts of online memory demand cost offline work, and what they spare it"

KINDS = ("fixed@5", "fixed@10", "fixed@20", "mu-sigma", "quantile", "conformal", "two-speed", "two-speed@50", "near")
HORIZON_S = 30
CONCEDED = 0.01
"""Attainment that a reservation may lose to the default's and still be compared with it."""
TIED = 0.99
"""Fraction of the best one's offline tokens/s that the default must reach in every window."""

CONV, CODE, MOONCAKE, SERVEGEN = LOADS


@dataclass(slots=True, frozen=True)
class Size:
    loads: tuple[Load, ...]
    kinds: tuple[str, ...]


FULL = Size(
    (
        replace(CONV, window_s=(600.0, 840.0)),
        replace(CODE, window_s=(1000.0, 1220.0)),
        replace(MOONCAKE, window_s=(600.0, 680.0)),
        replace(SERVEGEN, window_s=(600.0, 920.0)),
        replace(SERVEGEN, window_s=(1800.0, 2120.0)),
    ),
    KINDS,
)
"""Some 200 s each: the forecasts know 200 arrivals after 30 to 60 of them."""
QUICK = Size(
    (
        replace(CONV, window_s=(600.0, 678.0), warm_up_s=10.0),
        replace(SERVEGEN, window_s=(600.0, 704.0), warm_up_s=10.0),
    ),
    ("fixed@10", DEFAULT_HEADROOM, "two-speed"),
)


@dataclass(slots=True)
class ReservationWatch(EngineObserver):
    """What was reserved at the begin of each second, and the most that online work held or asked for in it.

    Asked for is more than held where prompts wait, for memory or for time: their blocks count.
    """

    reserved_blocks: list[int] = field(default_factory=list)
    """By second, as are these."""
    demand_blocks: list[int] = field(default_factory=list)

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self._look(draft.now_s, scheduler)

    def idle(self, start_s: float, scheduler: Scheduler) -> None:
        self._look(start_s, scheduler)

    def _look(self, now_s: float, scheduler: Scheduler) -> None:
        size = scheduler.kv.block_size
        waiting = sum(-(-request.num_tokens // size) for request in scheduler.queues.waiting_online)
        demand = scheduler.kv.num_online + waiting
        while len(self.reserved_blocks) <= int(now_s):
            self.reserved_blocks.append(scheduler.headroom.headroom_blocks(now_s))
            self.demand_blocks.append(demand)
        self.demand_blocks[-1] = max(self.demand_blocks[-1], demand)


@dataclass(slots=True, frozen=True)
class Kept:
    """How a reservation did in the window."""

    covered: float | None
    """Share of the seconds whose next ``HORIZON_S`` it held, of those in which no more than all blocks were asked for;
    None where there are none."""
    beyond_capacity: float
    """Share of the seconds whose next ``HORIZON_S`` asked for more: no reservation covers these."""
    reserved: float
    """Mean fraction of the blocks that is reserved."""

    @classmethod
    def of(cls, watch: ReservationWatch, window_s: tuple[float, float], num_blocks: int) -> "Kept":
        reserved, demand = np.array(watch.reserved_blocks), np.array(watch.demand_blocks)
        first, last = int(window_s[0]), min(int(window_s[1]), len(demand)) - HORIZON_S
        peaks = np.array([demand[second + 1 : second + 1 + HORIZON_S].max() for second in range(first, last)])
        inside = peaks <= num_blocks
        covered = (peaks <= reserved[first:last])[inside]
        return cls(
            float(covered.mean()) if len(covered) else None,
            1.0 - float(inside.mean()) if len(peaks) else 0.0,
            float(reserved[first:last].mean()) / num_blocks if len(peaks) else 0.0,
        )


@dataclass(slots=True, frozen=True)
class Outcome:
    result: SimResult
    kept: Kept

    @property
    def attained(self) -> float:
        return self.result.attained

    @property
    def tokens_per_s(self) -> float:
        return self.result.offline_tokens_per_s


Runs = dict[str, dict[str, Outcome]]
"""By window, by reservation."""


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    runs = {title(load): {kind: _outcome(load, kind) for kind in size.kinds} for load in size.loads}
    rows = [row for window, of in runs.items() for row in rows_of(window, of, judged=not quick)]
    data = {
        "settings": {"profile": PROFILE, "loads": msgspec.to_builtins(size.loads), "default": DEFAULT_HEADROOM},
        "runs": {window: {kind: _numbers(one) for kind, one in of.items()} for window, of in runs.items()},
    }
    against = f"{DEFAULT_HEADROOM}, the default"
    return ExperimentResult(NAME, rows, _notes(runs), data, lambda figure: _plot(figure, runs), against=against)


def title(load: Load) -> str:
    return f"{load.trace} {load.window_s[0]:g}:{load.window_s[1]:g}"


def _outcome(load: Load, kind: str) -> Outcome:
    logging.getLogger(__name__).info("%s, %s", title(load), kind)
    scenario: Scenario = replace(scenario_of(load), headroom=kind)
    watch = ReservationWatch()
    run = simulate(scenario, observers=[watch])
    return Outcome(run.result, Kept.of(watch, run.window_s, scenario.num_blocks))


def rows_of(window: str, runs: Mapping[str, Outcome], *, judged: bool) -> list[Row]:
    """Offline work under each reservation compared with the default's; and the default's compared with the best of
    those that attain about as much."""
    ours = runs[DEFAULT_HEADROOM]
    rows = [
        Row(f"{window}: {kind}, {_kept(one)}", one.tokens_per_s, ours.tokens_per_s, "tok/s", digits=0)
        for kind, one in runs.items()
    ]
    best = max(
        (one.tokens_per_s for one in runs.values() if one.attained >= ours.attained - CONCEDED),
    )
    share = ours.tokens_per_s / best if best else 0.0
    holds = share >= TIED if judged else None
    return [*rows, Row(f"{window}: {DEFAULT_HEADROOM}, of the best", 100 * share, unit="%", digits=1, holds=holds)]


def _kept(one: Outcome) -> str:
    covered = "-" if one.kept.covered is None else f"{100 * one.kept.covered:.0f}%"
    return f"{100 * one.attained:.1f}% attained, {covered} covered, {100 * one.kept.reserved:.0f}% reserved"


def _notes(runs: Runs) -> list[str]:
    return [
        *(line for window, of in runs.items() for line in _window_notes(window, of)),
        "Covered: of the seconds in the window, those at which the most that online work holds or asks for in the next "
        f"{HORIZON_S} s was reserved. Where it is more than all blocks no reservation covers it: such seconds are left "
        "out and told apart.",
        f"{PROFILE}, steps with {STEP_NOISE:.0%} noise, 2,048 tokens and 256 seats, one seed: a percent is noise.",
    ]


def _window_notes(window: str, runs: Mapping[str, Outcome]) -> Iterator[str]:
    for kind, one in runs.items():
        result = one.result
        online, preemptions = result.online, result.preemptions
        wait_s = result.offline.longest_wait_s or 0.0
        arrival = online.attainment["both_from_arrival"]
        yield (
            f"{window}, {kind}: {100 * one.attained:.1f}% attained ({100 * (arrival or 0.0):.1f}% from arrival), TTFT "
            f"p99 {1e3 * (online.ttft_s['p99'] or 0.0):,.0f} ms, {preemptions.count_by_class['offline']} offline and "
            f"{preemptions.count_by_class['online']} online preemptions, {result.wasted_tokens:,} tokens "
            f"computed again, longest wait {wait_s:.0f} s, demand beyond capacity in "
            f"{100 * one.kept.beyond_capacity:.0f}% of the seconds."
        )


def _numbers(one: Outcome) -> dict[str, Any]:
    return {
        "covered": one.kept.covered,
        "beyond_capacity": one.kept.beyond_capacity,
        "reserved": one.kept.reserved,
        "result": msgspec.to_builtins(one.result),
    }


def _plot(figure: Any, runs: Runs) -> None:
    """Offline tokens/s against what was reserved on average; the default is a star."""
    for axes, (window, of) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        for kind, one in of.items():
            is_default = kind == DEFAULT_HEADROOM
            place = (100 * one.kept.reserved, one.tokens_per_s)
            axes.plot(*place, "*" if is_default else "o", markersize=12 if is_default else 5)
            axes.annotate(kind, place, fontsize=6, xytext=(3, 3), textcoords="offset points")
        axes.set_title(window, fontsize=7)
        axes.set_xlabel("blocks reserved, % of all")
    figure.axes[0].set_ylabel("offline tokens/s")

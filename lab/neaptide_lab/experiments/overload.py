"""Goodput from below capacity to three times it, online alone and beside an offline flood.

Prompts and outputs have one length each, so that the capacity is a sum: a request costs the device its prefill, and
what a decode adds to a step, once for every token. For the same reason what a clairvoyant could serve in time is known:
where a prompt takes most of its TTFT target that is less than the capacity, and rises with the load, for it begins
another only where one arrives while there is still time for it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import DeviceProfile, load_profile
from neaptide.loadgen.workloads.offline_sets import load_offline
from neaptide.loadgen.workloads.online_sets import poisson_arrivals
from neaptide.loadgen.workloads.traces import TraceRequest, content_base
from neaptide.simulation.result import SimResult
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.price import price
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "overload"
ABOUT = "requests served in time per second, from below capacity to three times it, alone and beside an offline flood"

PROFILE = "a100-40g-llama-3.1-8b"
OFFLINE, OFFLINE_REQUESTS = "sharegpt_lengths", 4000
TTFT_SLO_S, TPOT_SLO_S = 1.0, 0.05
STEP_NOISE = 0.05
CONTEXT_TOKENS = 16_384
CLIENT_LIMIT_TOKENS = 1024
"""``max_tokens`` of offline requests; online ones ask for what they get."""
KEPT_SHARE = 0.85
"""Fraction of the best goodput at any load that must remain at every load above the capacity."""


@dataclass(slots=True, frozen=True)
class Lengths:
    """Lengths of every online request."""

    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.prompt_tokens}/{self.output_tokens}"


@dataclass(slots=True, frozen=True)
class Size:
    lengths: tuple[Lengths, ...]
    loads: tuple[float, ...]
    """As multiples of the capacity."""
    window_s: float


ALL = (Lengths(2000, 150), Lengths(500, 250), Lengths(8000, 100))
FULL = Size(ALL, (0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0), 60.0)
QUICK = Size(ALL[:1], (0.8, 1.0, 1.5), 20.0)


def run(quick: bool) -> ExperimentResult:
    size = QUICK if quick else FULL
    profile = load_profile(PROFILE)
    curves: dict[str, list[SimResult]] = {}
    capacities_rps = {str(lengths): capacity_rps(profile, lengths) for lengths in size.lengths}
    for lengths in size.lengths:
        for name, flood in (("alone", False), ("beside a flood", True)):
            logging.getLogger(__name__).info("%s %s", lengths, name)
            rates_rps = [load * capacities_rps[str(lengths)] for load in size.loads]
            curves[f"{lengths} {name}"] = [_simulated(profile, lengths, rate, size, flood) for rate in rates_rps]
    possible = {
        str(lengths): [
            possible_rps(profile, lengths, _arrivals_s(load * capacities_rps[str(lengths)], size.window_s))
            for load in size.loads
        ]
        for lengths in size.lengths
    }
    data: dict[str, Any] = {
        "settings": {
            "profile": PROFILE,
            "ttft_slo_s": TTFT_SLO_S,
            "tpot_slo_s": TPOT_SLO_S,
            "step_noise": STEP_NOISE,
            "offline": OFFLINE,
            "window_s": size.window_s,
            "loads": list(size.loads),
            "capacity_rps": capacities_rps,
            "possible_rps": possible,
        },
        "curves": {name: [_numbers(result) for result in curve] for name, curve in curves.items()},
    }
    notes = [
        *(
            f"{name} at {load:g}x: {one.offline_tokens_per_s:,.0f} offline tok/s; {price(one)}."
            for name, curve in curves.items()
            for load, one in zip(size.loads, curve, strict=True)
        ),
        "What is possible counts no decode beside a prompt, no fixed cost of a step and no noise: in a window that is "
        "long against an answer goodput stays below it.",
        "A window that is short against an answer flatters: its last answers end behind it.",
        f"{PROFILE}, steps with {STEP_NOISE:.0%} noise, Poisson arrivals of {size.window_s:.0f} s, TTFT {TTFT_SLO_S:g} "
        f"s, TPOT {1e3 * TPOT_SLO_S:.0f} ms, 256 seats, 2,048 tokens a step, context {CONTEXT_TOKENS:,}, max_tokens "
        f"{CLIENT_LIMIT_TOKENS:,}.",
    ]
    rows = [row for name, curve in curves.items() for row in _rows(name, curve, size, possible[name.split()[0]])]
    return ExperimentResult(NAME, rows, notes, data, lambda figure: _plot(figure, curves, size), against="possible")


def capacity_rps(profile: DeviceProfile, lengths: Lengths) -> float:
    """Requests per second that no policy can serve more of, in the fluid limit."""
    model = RooflineModel.from_profile(profile)
    prefill = BatchShape()
    prefill.add(lengths.prompt_tokens, 0)
    context = lengths.prompt_tokens + lengths.output_tokens // 2
    beside = prefill.plus_decodes(1, context, context)
    decode_s = model.predict(beside).seconds - model.predict(prefill).seconds
    return 1.0 / (_prefill_s(profile, lengths) + decode_s * lengths.output_tokens)


def possible_rps(profile: DeviceProfile, lengths: Lengths, arrivals_s: Sequence[float]) -> float:
    """Requests per second between the first of these arrivals and the last that get their first token in time from a
    device that does nothing but prefills, one after the other, and not more than the capacity.

    In order of arrival, all that still can be in time: with prompts of one length and one target no other choice serves
    more, for it is never ahead of this one, neither in prompts done nor in the time when they are.
    """
    prefill_s = _prefill_s(profile, lengths)
    free_s, count = 0.0, 0
    for arrival_s in arrivals_s:
        end_s = max(free_s, arrival_s) + prefill_s
        if end_s <= arrival_s + TTFT_SLO_S:
            free_s, count = end_s, count + 1
    return min(count / (arrivals_s[-1] - arrivals_s[0]), capacity_rps(profile, lengths))


def _prefill_s(profile: DeviceProfile, lengths: Lengths) -> float:
    """Seconds of a prompt, without the fixed cost of steps."""
    prefill = BatchShape()
    prefill.add(lengths.prompt_tokens, 0)
    _, *rest_s = RooflineModel.from_profile(profile).terms(prefill)
    return sum(rest_s)


def _arrivals_s(rate_rps: float, window_s: float) -> list[float]:
    return poisson_arrivals(np.random.default_rng(0), np.array([rate_rps]), window_s)


def _simulated(profile: DeviceProfile, lengths: Lengths, rate_rps: float, size: Size, flood: bool) -> SimResult:
    arrivals_s = _arrivals_s(rate_rps, size.window_s)
    base = content_base("overload")
    online = [
        TraceRequest(arrival_s, ((base + number, lengths.prompt_tokens),), lengths.output_tokens)
        for number, arrival_s in enumerate(arrivals_s)
    ]
    alone = Scenario(
        profile=profile,
        online=online,
        ttft_slo_s=TTFT_SLO_S,
        tpot_slo_s=TPOT_SLO_S,
        max_model_len=CONTEXT_TOKENS,
        max_output_tokens=CLIENT_LIMIT_TOKENS,
        step_noise=STEP_NOISE,
        drain_s=TTFT_SLO_S + lengths.output_tokens * TPOT_SLO_S,
    )
    offline = [load_offline(OFFLINE, seed=0, limit=OFFLINE_REQUESTS)] if flood else []
    return simulate(replace(alone, offline=offline)).result


def _rows(name: str, curve: list[SimResult], size: Size, possible: list[float]) -> list[Row]:
    goodput = [result.online.goodput_rps or 0.0 for result in curve]
    rows = [
        Row(f"{name}: goodput at {load:g}x", each, most, "req/s")
        for load, each, most in zip(size.loads, goodput, possible, strict=True)
    ]
    share = _least_of_best(goodput, size)
    kept = Row(f"{name}: least of the best, from 1x on", 100 * share, unit="%", holds=share >= KEPT_SHARE)
    of_possible = Row(f"{name}: the same of what is possible", 100 * _least_of_best(possible, size), unit="%")
    return [*rows, kept, of_possible]


def _least_of_best(rates_rps: list[float], size: Size) -> float:
    best = max(rates_rps)
    least = min(each for load, each in zip(size.loads, rates_rps, strict=True) if load >= 1.0)
    return least / best if best else 0.0


def _numbers(result: SimResult) -> dict[str, Any]:
    return {
        "goodput_rps": result.online.goodput_rps,
        "attainment": result.online.attainment,
        "ttft_s": result.online.ttft_s,
        "tpot_s": result.online.tpot_s,
        "itl_s": result.online.itl_s,
        "offline_tokens_per_s": result.offline.tokens_per_s,
        "longest_wait_s": result.offline.longest_wait_s,
        "preemptions": msgspec.to_builtins(result.preemptions),
        "wasted_tokens": result.wasted_tokens,
    }


def _plot(figure: Any, curves: dict[str, list[SimResult]], size: Size) -> None:
    axes = figure.subplots()
    for name, curve in curves.items():
        style = "--" if name.endswith("flood") else "-"
        axes.plot(size.loads, [result.online.goodput_rps or 0.0 for result in curve], style, marker="o", label=name)
    axes.set_xlabel("load, as a multiple of the capacity")
    axes.set_ylabel("requests served in time per second")
    axes.set_ylim(bottom=0)
    axes.legend()

"""Upper bound on the online requests that any policy can serve in time, if all arrivals and lengths are known.

A policy is a schedule of device time. The bound drops everything that makes schedules hard, so it holds for each:

- The device is fluid. A step's fixed cost and its weights are free but for what the cheapest step leaves per token
  (``UnitCosts``). Any number of requests runs at once. KV memory is unlimited, and planning takes no time.
- Every prefix that an earlier arrival or offline work shares is cached, even if nobody computed it. Keys and values
  that any other request shares are read for free.
- A request in time has its whole prompt computed by ``arrival + TTFT``. Its last token comes by
  ``arrival + TTFT + (tokens - 1) * TPOT``, because TPOT is a mean from the first token.

Three relaxations bound the count; the least one counts, for every group of successive arrivals.

1. Alone: a request whose own prompt or decodes take too long on an empty device is never in time.
2. Prompts: those of a group run one after the other. With one TTFT target, deadlines are ordered like arrivals. Then
   first come, first served is optimal for a set of prompts, and the largest set is found exactly: take prompts in order
   and, when one is late, drop the one without which the rest ends soonest (Moore-Hodgson with release times, by Kise,
   Ibaraki and Mine, 1978).
3. Work: all that the group must have done by some time fits between its first arrival and that time. The requests with
   the least work come first. By that time a request in time has its prompt, and all decodes but those that still fit
   until its last deadline, one a step.

Groups are disjoint, so their bounds add up; the best division is found by dynamic programming.

The times are those of the cost model. A run with noise may be lucky and exceed the bound by a little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from neaptide.engine.arrays import FloatArray
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.step_cost import StepFormula
from neaptide.loadgen.workloads.traces import TraceRequest
from neaptide.simulation.bound import UnitCosts, cached_prefixes
from neaptide.simulation.measures import CLOCK_ERROR_S
from neaptide.simulation.scenario import Scenario

MAX_GROUPS = 24
"""Most groups into which the arrivals are divided."""
QUANTILES = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Quantiles of a group's last deadlines at which its work is compared with the time."""


@dataclass(slots=True, frozen=True)
class Job:
    """Least device time of an online request."""

    arrival_s: float
    prefill_s: float
    """Device time of its prompt, in seconds."""
    decode_s: float
    """Device time of one decode, in seconds."""
    num_decodes: int
    first_step_s: float
    """Least time of a step with a part of its prompt, in seconds."""
    step_s: float
    """Least time of a step with one of its decodes, in seconds."""

    def is_possible(self, ttft_slo_s: float, tpot_slo_s: float) -> bool:
        """Whether it can be in time alone."""
        keeps_pace = not self.num_decodes or self.step_s <= tpot_slo_s + CLOCK_ERROR_S
        return max(self.prefill_s, self.first_step_s) <= ttft_slo_s + CLOCK_ERROR_S and keeps_pace


def most_in_time(arrivals_s: Sequence[float], prefills_s: Sequence[float], ttft_slo_s: float) -> list[int]:
    """For each number of first prompts, the most of them that one device can compute in time, one after the other.

    Args:
        arrivals_s: in ascending order.
        prefills_s: each at most ``ttft_slo_s``.
        ttft_slo_s: target of all.
    """
    kept: list[tuple[float, float, float]] = []
    """(arrival, prefill, start) of each prompt that is in time."""
    free_s, counts = 0.0, []
    for arrival_s, prefill_s in zip(arrivals_s, prefills_s, strict=True):
        start_s = max(free_s, arrival_s)
        kept.append((arrival_s, prefill_s, start_s))
        free_s = start_s + prefill_s
        if free_s > arrival_s + ttft_slo_s + CLOCK_ERROR_S:
            _drop_one(kept)
            free_s = kept[-1][2] + kept[-1][1] if kept else 0.0
        counts.append(len(kept))
    return counts


def _drop_one(kept: list[tuple[float, float, float]]) -> None:
    """Drops the prompt without which the others end soonest; those after it move up."""
    chosen, most_s, room_s = len(kept) - 1, 0.0, float("inf")
    for index in range(len(kept) - 1, -1, -1):
        arrival_s, prefill_s, start_s = kept[index]
        if min(prefill_s, room_s) > most_s:
            chosen, most_s = index, min(prefill_s, room_s)
        room_s = min(room_s, start_s - arrival_s)
        if room_s <= most_s:
            break  # none before it moves the end by more
    moved = kept[chosen + 1 :]
    del kept[chosen:]
    free_s = kept[-1][2] + kept[-1][1] if kept else 0.0
    for arrival_s, prefill_s, _ in moved:
        start_s = max(free_s, arrival_s)
        kept.append((arrival_s, prefill_s, start_s))
        free_s = start_s + prefill_s


def most_by_work(jobs: Sequence[Job], ttft_slo_s: float, tpot_slo_s: float, num_devices: int = 1) -> int:
    """Most of these jobs whose work fits between the first arrival and each of some times after the last prompt."""
    arrival_s, prefill_s, decode_s, decodes, step_s = (
        np.array(column, np.float64)
        for column in zip(*((j.arrival_s, j.prefill_s, j.decode_s, j.num_decodes, j.step_s) for j in jobs), strict=True)
    )
    first_due_s = arrival_s + ttft_slo_s
    last_due_s = first_due_s + decodes * tpot_slo_s
    least = len(jobs)
    for end_s in (first_due_s[-1], *np.quantile(last_due_s, QUANTILES).tolist()):
        if end_s < first_due_s[-1]:
            continue
        left_s = np.maximum(last_due_s - end_s, 0.0)
        # One step may run across the end.
        must: FloatArray = np.where(left_s > 0.0, np.maximum(decodes - left_s / step_s - 1.0, 0.0), decodes)
        work_s = np.cumsum(np.sort(prefill_s + must * decode_s))
        capacity_s = num_devices * (end_s - arrival_s[0]) + CLOCK_ERROR_S
        least = min(least, int(np.searchsorted(work_s, capacity_s, side="right")))
    return least


def most_jobs(jobs: Sequence[Job], ttft_slo_s: float, tpot_slo_s: float, num_devices: int = 1) -> int:
    """Most of these jobs, in order of arrival, that any policy has in time on this many devices."""
    possible = [job for job in jobs if job.is_possible(ttft_slo_s, tpot_slo_s)]
    if not possible:
        return 0
    num_groups = min(MAX_GROUPS, len(possible))
    bounds = [len(possible) * group // num_groups for group in range(num_groups + 1)]
    least = [0] * (num_groups + 1)
    for end in range(1, num_groups + 1):
        least[end] = len(possible)
    for begin in range(num_groups):
        group = possible[bounds[begin] :]
        prefills_s = [job.prefill_s / num_devices for job in group]
        counts = most_in_time([job.arrival_s for job in group], prefills_s, ttft_slo_s)
        for end in range(begin + 1, num_groups + 1):
            size = bounds[end] - bounds[begin]
            by_work = most_by_work(group[:size], ttft_slo_s, tpot_slo_s, num_devices)
            least[end] = min(least[end], least[begin] + min(counts[size - 1], by_work))
    return least[num_groups]


def jobs_of(scenario: Scenario, requests: Sequence[TraceRequest], line: int = 0) -> list[Job]:
    """The least work of the requests on the scenario's device.

    Args:
        scenario: device, offline work and limits.
        requests: in order of arrival, each with room for an answer.
        line: which of the two sums of ``BoundWork.lines_s`` counts as time.

    Raises:
        ValueError: the scenario's step times are not its profile's.
    """
    if scenario.truth is not None:
        raise ValueError("the bound on attainment needs the step times of the profile")
    costs = UnitCosts.of(scenario.profile)
    # A policy may compute a prompt's last tokens one by one: as decodes, which read the context instead.
    costs = replace(costs, pair_s=min(costs.pair_s, costs.kv_token_s), prefill_request_s=0.0)
    formulas = [
        StepFormula(cost, scenario.overlap_kappa, scenario.profile.tile_tokens)
        for cost in scenario.profile.costs.values()
    ]

    def seconds(shape: BatchShape) -> float:
        return costs.work(shape).lines_s(scenario.overlap_kappa)[line]

    def least_step_s(shape: BatchShape) -> float:
        return min(sum(formula.terms(shape)) for formula in formulas)

    first_step_s = least_step_s(BatchShape().plus(1, 0))
    offline = [row.segments for one in scenario.offline for row in one.requests]
    prompts = [*offline, *(request.segments for request in requests)]
    cached = list(cached_prefixes(prompts, scenario.block_size))
    cached_by_later = list(cached_prefixes(prompts[::-1], scenario.block_size))[::-1]
    jobs = []
    for request, before, after in zip(requests, cached[len(offline) :], cached_by_later[len(offline) :], strict=True):
        prefill, decode = BatchShape(), BatchShape()
        prefill.add(request.input_tokens - before, before)
        prefill.prefill_context_tokens = 0
        own_tokens = request.input_tokens - max(before, after) + 1
        decode.add_decodes(1, own_tokens, own_tokens)
        outputs = min(request.output_tokens, scenario.output_limit(request))
        jobs.append(
            Job(request.arrival_s, seconds(prefill), seconds(decode), outputs - 1, first_step_s, least_step_s(decode))
        )
    return jobs


def attainment_bound(scenario: Scenario, num_devices: int = 1) -> float | None:
    """Largest fraction of the scenario's online requests that any policy has in time; None without any.

    Args:
        scenario: whatever its policy is.
        num_devices: replicas among which a clairvoyant divides every request's work as it likes.

    Raises:
        ValueError: the scenario's step times are not its profile's.
    """
    window = scenario.window_s
    requests = [r for r in scenario.online if r.segments and scenario.output_limit(r) > 0]
    is_inside = [window is None or window[0] <= r.arrival_s <= window[1] for r in requests]
    if not any(is_inside):
        return None
    most = len(requests)
    for line in (0,) if scenario.overlap_kappa == 1.0 else (0, 1):
        jobs = list(compress(jobs_of(scenario, requests, line), is_inside))
        most = min(most, most_jobs(jobs, scenario.ttft_slo_s, scenario.tpot_slo_s, num_devices))
    return most / sum(is_inside)

"""Figures of a record by itself, without any model."""

import msgspec

from neaptide.observation.draws import share_below
from neaptide.observation.exposition import (
    ANSWERS,
    E2E,
    INFERENCE,
    ITL,
    PREEMPTIONS,
    PROMPTS,
    QUEUE,
    STEP_TOKENS,
    TPOT,
    TTFT,
)
from neaptide.observation.record import ServerRecord, buckets_of
from neaptide.observation.traffic import InferredTraffic, arrivals_by_interval

MAX_OVERHEAD_S = 10.0


class Share(msgspec.Struct, frozen=True):
    """A share of requests, read from buckets: an estimate between exact bounds."""

    value: float
    low: float
    high: float


class ObservedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a record. Times are in seconds; None where the server has no such series."""

    seconds: float
    polls: int
    failed_polls: int
    restarts: int
    arrivals: int
    ended: int
    aborted: int
    exact_lengths: int
    prompt_tokens: float | None
    """Mean of a request."""
    answer_tokens: float | None
    hit_ratio: float
    ttft_s: float | None
    """Mean."""
    gap_s: float | None
    """Mean time between two tokens of a stream."""
    in_ttft: Share | None
    """Share of the requests within the TTFT target."""
    in_tpot: Share | None
    overhead_s: float
    """Mean time of a request outside queue and steps: tokenizing, the front end, the sockets between processes, and
    waiting for the step that runs when it comes, which vLLM's queue does not count."""
    steps_per_s: float
    streams: float
    """Streams that run at a random moment."""
    preemptions: int


def observed_figures(
    record: ServerRecord, traffic: InferredTraffic, ttft_slo_s: float, tpot_slo_s: float
) -> ObservedFigures:
    """The figures of a record with at least one interval."""
    totals = record.totals()

    def mean(name: str) -> float | None:
        count = totals.get(f"{name}_count", 0.0)
        return totals.get(f"{name}_sum", 0.0) / count if count else None

    def share(name: str, limit: float) -> Share | None:
        found = share_below(buckets_of(totals, name), limit)
        return None if found is None else Share(*found)

    arrivals, aborted = arrivals_by_interval(record.intervals)
    outside = (mean(E2E), mean(QUEUE), mean(INFERENCE))
    overhead_s = 0.0
    if None not in outside:
        whole_s, queue_s, inference_s = (each or 0.0 for each in outside)
        overhead_s = min(max(whole_s - queue_s - inference_s, 0.0), MAX_OVERHEAD_S)
    return ObservedFigures(
        seconds=record.seconds,
        polls=len(record.intervals) + 1,
        failed_polls=record.failures,
        restarts=sum(each.restarted for each in record.intervals),
        arrivals=sum(arrivals),
        ended=round(totals.get(f"{PROMPTS}_count", 0.0)),
        aborted=aborted,
        exact_lengths=traffic.exact,
        prompt_tokens=mean(PROMPTS),
        answer_tokens=mean(ANSWERS),
        hit_ratio=traffic.hit_ratio,
        ttft_s=mean(TTFT),
        gap_s=mean(ITL),
        in_ttft=share(TTFT, ttft_slo_s),
        in_tpot=share(TPOT, tpot_slo_s),
        overhead_s=overhead_s,
        steps_per_s=totals.get(f"{STEP_TOKENS}_count", 0.0) / record.seconds,
        streams=totals.get(f"{ITL}_sum", 0.0) / record.seconds,
        preemptions=round(totals.get(PREEMPTIONS, 0.0)),
    )


class Means(msgspec.Struct, frozen=True):
    """Means of a part of a record, in seconds; None without observations."""

    ttft_s: float | None
    gap_s: float | None


def means_between(record: ServerRecord, start_s: float, end_s: float) -> Means:
    """The means of the polls inside a part of a record, counted from the first poll."""
    first_s = record.intervals[0].start_s
    inside = [each for each in record.intervals if start_s <= each.end_s - first_s and each.start_s - first_s <= end_s]

    def mean(name: str) -> float | None:
        count = sum(each.count(name) for each in inside)
        return sum(each.sum(name) for each in inside) / count if count else None

    return Means(mean(TTFT), mean(ITL))

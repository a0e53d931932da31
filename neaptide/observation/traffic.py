"""Arrivals and lengths of the single requests behind a record, which holds only sums and histograms.

- **How many arrive between two polls** is exact: those that ended, and the change of those that run or wait.
- **Lengths** are known when a request ends. Where one ended between two polls they are exact. Else they are drawn
  inside the buckets, so that the sums are exact.
- **When one arrived** follows from its end and its latency. Within an interval places are random.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from neaptide.loadgen.workloads.traces import Segments, TraceRequest, content_base
from neaptide.observation.draws import drawn_counts, drawn_values
from neaptide.observation.exposition import ANSWERS, E2E, HITS, PROMPTS, QUERIES, RUNNING, WAITING
from neaptide.observation.record import PollInterval, ServerRecord

LEAST_HITS = 0.01
"""Share of prompt tokens from the cache below which prompts are taken to share nothing."""
BLOCK_TOKENS = 16
"""Block size to which shared prefixes are rounded, if the record names none."""


@dataclass(slots=True, frozen=True)
class InferredTraffic:
    """The requests of a record."""

    requests: list[TraceRequest]
    """In order of arrival, from the first poll on."""
    exact: int
    """Requests whose lengths are exact."""
    aborted: int
    """Requests that left without an end that the server counts, such as those of clients that closed the connection."""
    resampled: int
    """Requests that had not ended at the last poll. Their lengths are those of others."""
    hit_ratio: float
    """Share of the prompt tokens that came from the server's cache."""


@dataclass(slots=True, frozen=True)
class _Ended:
    """A request that ended inside the record."""

    arrival_s: float
    """As its end and its latency say."""
    prompt_tokens: int
    answer_tokens: int
    is_exact: bool


def traffic_of(record: ServerRecord, seed: int) -> InferredTraffic:
    """The requests of a record. Everything that is drawn depends on the seed alone."""
    rng = np.random.default_rng([content_base("observed") >> 31, seed])
    arrivals, aborted = arrivals_by_interval(record.intervals)
    places_s = np.concatenate(
        [np.zeros(0)]
        + [
            np.sort(rng.uniform(each.start_s, each.end_s, n))
            for each, n in zip(record.intervals, arrivals, strict=True)
        ]
    )
    first_s = record.intervals[0].start_s if record.intervals else 0.0
    ended = sorted(_ended(rng, record.intervals), key=lambda one: one.arrival_s)
    at_start = round(_open(record.intervals[0].before)) if record.intervals else 0
    known = ended[min(at_start, max(len(ended) - len(places_s), 0)) :]
    known = known[max(len(known) - len(places_s), 0) :]
    missing = len(places_s) - len(known)
    others = [ended[k] for k in rng.integers(len(ended), size=missing)] if ended else []
    totals = record.totals()
    queries = totals.get(QUERIES, 0.0)
    hit_ratio = min(totals.get(HITS, 0.0) / queries, 1.0) if queries else 0.0
    block_tokens = _block_tokens(record)
    base = content_base(f"observed {seed}")
    starts_s = [each.start_s for each in record.intervals]
    requests = []
    for number, (one, place_s) in enumerate(zip(known + others, places_s.tolist(), strict=False)):
        interval = record.intervals[max(bisect_right(starts_s, place_s) - 1, 0)]
        own_s = one.arrival_s
        arrival_s = own_s if number < len(known) and interval.start_s <= own_s < interval.end_s else place_s
        segments = _segments(rng, base, number, one.prompt_tokens, hit_ratio, block_tokens)
        requests.append(TraceRequest(arrival_s - first_s, segments, one.answer_tokens))
    requests.sort(key=lambda request: request.arrival_s)
    return InferredTraffic(requests, sum(one.is_exact for one in known), aborted, len(others), hit_ratio)


def arrivals_by_interval(intervals: Sequence[PollInterval]) -> tuple[list[int], int]:
    """Number of arrivals in each interval, and the number of requests that left without an end.

    More of these than arrivals in one interval make a negative sum. It counts as no arrival.
    """
    arrivals, aborted = [], 0
    for each in intervals:
        number = round(each.count(PROMPTS) + _open(each.after) - _open(each.before))
        arrivals.append(max(number, 0))
        aborted += max(-number, 0)
    return arrivals, aborted


def _open(gauges: dict[str, float]) -> float:
    return gauges.get(RUNNING, 0.0) + gauges.get(WAITING, 0.0)


def _ended(rng: np.random.Generator, intervals: Sequence[PollInterval]) -> Iterator[_Ended]:
    for each in intervals:
        prompts = drawn_counts(rng, each.buckets(PROMPTS), each.sum(PROMPTS))
        answers = np.sort(drawn_counts(rng, each.buckets(ANSWERS), each.sum(ANSWERS)))
        # A longer answer takes longer.
        latencies_s = np.sort(drawn_values(rng, each.buckets(E2E), each.sum(E2E)))
        ends_s = rng.uniform(each.start_s, each.end_s, len(prompts))
        number = min(len(prompts), len(answers), len(latencies_s))
        for k in range(number):
            arrival_s = float(ends_s[k] - latencies_s[k])
            yield _Ended(arrival_s, int(prompts[k]), int(answers[k]), number == 1)


def _block_tokens(record: ServerRecord) -> int:
    text = record.header.labels.get("block_size", "")
    return int(text) if text.isdecimal() and int(text) > 0 else BLOCK_TOKENS


def _segments(
    rng: np.random.Generator, base: int, number: int, prompt_tokens: int, hit_ratio: float, block_tokens: int
) -> Segments:
    """A prompt with the share of cached tokens that the server had on average, in whole blocks."""
    shared = 0
    if hit_ratio >= LEAST_HITS:
        blocks = hit_ratio * prompt_tokens / block_tokens
        shared = min(int(blocks + rng.random()) * block_tokens, (prompt_tokens - 1) // block_tokens * block_tokens)
    own = (base + 1 + number, prompt_tokens - shared)
    return ((base, shared), own) if shared else (own,)

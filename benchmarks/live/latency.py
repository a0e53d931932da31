"""Latencies of all online requests of a window. A request without an answer counts as infinitely slow."""

import math
from collections.abc import Sequence

from neaptide.loadgen.client.recorder import ChatRecord


def ttfts_s(records: Sequence[ChatRecord]) -> list[float]:
    return [math.inf if r.error is not None or r.ttft_s is None else r.ttft_s for r in records]


def tpots_s(records: Sequence[ChatRecord]) -> list[float]:
    """TPOT of each request; every answer has at least two tokens."""
    return [math.inf if r.error is not None or r.tpot_s is None else r.tpot_s for r in records]


def percentile_of_all(values: Sequence[float], q: float) -> float:
    """Percentile, linear between the nearest ranks. Infinite if one of them is; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return high if math.isinf(high) else low + (at - math.floor(at)) * (high - low)


def ttft_p99_ratio(records: Sequence[ChatRecord], others: Sequence[ChatRecord]) -> float | None:
    """TTFT p99 of these requests over the others'; None if one is infinite or there are no requests."""
    p99_s, others_s = (percentile_of_all(ttfts_s(each), 0.99) for each in (records, others))
    return round(p99_s / others_s, 4) if math.isfinite(p99_s) and math.isfinite(others_s) else None

"""Latencies of a window over all its online requests: whoever got no answer has waited longer than all others."""

import math
from collections.abc import Sequence

from neaptide.loadgen.client.recorder import Record


def ttfts_s(records: Sequence[Record]) -> list[float]:
    return [math.inf if r.error is not None or r.ttft_s is None else r.ttft_s for r in records]


def tpots_s(records: Sequence[Record]) -> list[float]:
    """Every answer has two tokens at least."""
    return [math.inf if r.error is not None or r.tpot_s is None else r.tpot_s for r in records]


def percentile_of_all(values: Sequence[float], q: float) -> float:
    """Linear between the nearest ranks, and infinite where one of them is; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return high if math.isinf(high) else low + (at - math.floor(at)) * (high - low)


def ttft_p99_ratio(records: Sequence[Record], others: Sequence[Record]) -> float | None:
    """These requests' over the others'; None where one is infinite, or of nothing."""
    p99_s, others_s = (percentile_of_all(ttfts_s(each), 0.99) for each in (records, others))
    return round(p99_s / others_s, 4) if math.isfinite(p99_s) and math.isfinite(others_s) else None

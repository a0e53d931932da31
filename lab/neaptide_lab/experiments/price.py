"""What throughput was bought with: the same figures under every table that compares policies."""

from neaptide.simulation.result import SimResult


def price(result: SimResult) -> str:
    """Latencies, preemptions, tokens computed for nothing or twice, the longest wait."""
    online, offline, preemptions = result.online, result.offline, result.preemptions
    latencies = [
        f"{name} {' / '.join(_ms(values[q]) for q in ('p50', 'p99'))} ms"
        for name, values in (("TTFT", online.ttft_s), ("TPOT", online.tpot_s), ("gaps", online.itl_s))
    ]
    of_class = preemptions.count_by_class
    return (
        f"{', '.join(latencies)} (p50 / p99), {_percent(online.attainment['both'])} both targets, "
        f"{_percent(online.attainment['both_from_arrival'])} from arrival; preempted "
        f"{sum(of_class.values()):,} ({of_class['online']:,} online); {result.wasted_tokens:,} tokens computed again, "
        f"{preemptions.swapped_blocks:,} blocks copied, longest wait {offline.longest_wait_s or 0.0:.0f} s"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"

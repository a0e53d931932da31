"""Histograms and counters without locks have the format of the client library's own."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from neaptide.server.observe.gaps import TallyCounter, TallyHistogram

BOUNDS = (0.001, 0.5, 1, 10)
GAPS = (0.001, 0.0011, 0.4, 0.5, 0.7, 3.0, 11.0)


def lines(registry: CollectorRegistry) -> set[str]:
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


def test_a_histogram_says_what_the_library_would_say() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = TallyHistogram(["gap"], "A gap.", ["tier"], [["a"], ["b"]], BOUNDS, ours).tallies[("a",)]
    histogram = Histogram("gap", "A gap.", ["tier"], buckets=BOUNDS, registry=theirs)
    histogram.labels("b")
    for gap_s in GAPS:
        tally.observe(gap_s)
        histogram.labels("a").observe(gap_s)

    assert 'gap_bucket{le="0.5",tier="a"} 4.0' in lines(ours)
    assert lines(ours) == lines(theirs)


def test_a_counter_says_what_the_library_would_say() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = TallyCounter("tokens", "Tokens.", ["tier", "kind"], [["a", "x"], ["b", "x"]], ours).counts
    counter = Counter("tokens", "Tokens.", ["tier", "kind"], registry=theirs)
    counter.labels("b", "x")
    for count in (1, 5):
        counts["a", "x"] += count
        counter.labels("a", "x").inc(count)
    assert 'tokens_total{kind="x",tier="a"} 6.0' in lines(ours)
    assert lines(ours) == lines(theirs)

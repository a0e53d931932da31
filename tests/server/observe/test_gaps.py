"""The histogram of gaps has the format of the client library's own."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from neaptide.server.observe.gaps import TallyHistogram

BOUNDS = (0.001, 0.5, 1, 10)
GAPS = (0.001, 0.0011, 0.4, 0.5, 0.7, 3.0, 11.0)


def test_it_says_what_the_library_would_say() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = TallyHistogram(["gap"], "A gap.", ["tier"], [["a"], ["b"]], BOUNDS, ours).tallies[("a",)]
    histogram = Histogram("gap", "A gap.", ["tier"], buckets=BOUNDS, registry=theirs)
    histogram.labels("b")
    for gap_s in GAPS:
        tally.observe(gap_s)
        histogram.labels("a").observe(gap_s)

    def lines(registry: CollectorRegistry) -> set[str]:
        return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}

    assert 'gap_bucket{le="0.5",tier="a"} 4.0' in lines(ours)
    assert lines(ours) == lines(theirs)

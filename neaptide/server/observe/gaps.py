"""Histograms and counters of values that come with every token or step."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally:
    """Counts of one labelled series of a histogram. Not thread-safe: event loop only.

    The client library's own takes a lock twice for a value, which is most of its time.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """As ``observe`` for each, in less time."""
        ordered, before = sorted(values), 0
        for index, bound in enumerate(self._bounds):
            count = bisect_right(ordered, bound)
            self.counts[index] += count - before
            before = count
        self.counts[-1] += len(ordered) - before
        self.sum += sum(ordered)


class TallyHistogram(Collector):
    """Prometheus histogram over tallies.

    Args:
        names: names of the series, all with the same values.
        labels: names of the labels.
        values: values of the labels of each tally.
        bounds: upper bounds of the buckets, without infinity.
    """

    def __init__(
        self,
        names: Sequence[str],
        text: str,
        labels: Sequence[str],
        values: Iterable[Sequence[str]],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._names, self._text, self._labels = names, text, labels
        # As the client library writes them: 1.0, not 1.
        self._bounds = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self.tallies = {tuple(each): Tally(bounds) for each in values}
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        for name in self._names:
            family = HistogramMetricFamily(name, self._text, labels=self._labels)
            for values, tally in self.tallies.items():
                total, buckets = 0, []
                for bound, count in zip(self._bounds, tally.counts, strict=True):
                    total += count
                    buckets.append((bound, float(total)))
                family.add_metric(values, buckets, tally.sum)
            yield family


class TallyCounter(Collector):
    """Prometheus counter that takes no lock. Not thread-safe: event loop only.

    Args:
        name: of the series, without ``_total``.
        labels: names of the labels.
        values: values of the labels of each count.
    """

    def __init__(
        self, name: str, text: str, labels: Sequence[str], values: Iterable[Sequence[str]], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.counts = {tuple(each): 0 for each in values}
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self.counts.items():
            family.add_metric(values, count)
        yield family

"""Series that describe the server: what it is, and the targets that boards draw as lines."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from neaptide.server.observe.facts import ServerFacts

_LABELS = ("version", "model", "policy", "device", "dtype")


class InfoMetrics(Collector):
    """Collects the series from the facts of the moment."""

    def __init__(self, registry: CollectorRegistry, facts: Callable[[], ServerFacts]) -> None:
        self._facts = facts
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        facts = self._facts()
        targets = GaugeMetricFamily(
            "neaptide_target_seconds", "Latency target of requests that set none of their own.", labels=["slo"]
        )
        targets.add_metric(["ttft"], facts.ttft_slo_s)
        targets.add_metric(["tpot"], facts.tpot_slo_s)
        yield targets
        info = GaugeMetricFamily("neaptide_build_info", "What the server is, in the labels; always 1.", labels=_LABELS)
        info.add_metric([getattr(facts, name) for name in _LABELS], 1)
        yield info

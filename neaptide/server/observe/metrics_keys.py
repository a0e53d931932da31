"""Series of API keys. Their label is one of the operator's keys, never what a caller sends."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from neaptide.server.batches.receipts.book import CostBook
from neaptide.server.http.auth import Principal
from neaptide.server.limits.usage import LimitName


class KeyMetrics:
    """Requests and tokens of each key. A server without keys has none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "neaptide_key_requests_total",
            "Number of admitted requests of an API key that have ended.",
            ["key"],
            registry=registry,
        )
        self._tokens = Counter(
            "neaptide_key_tokens_total",
            "Number of prompt and answer tokens of an API key's requests that have ended.",
            ["key"],
            registry=registry,
        )
        self._refused = Counter(
            "neaptide_key_refused_total",
            "Number of requests of an API key that its limits refused.",
            ["key", "limit"],
            registry=registry,
        )

    def ended(self, principal: Principal, tokens: int, counts: bool) -> None:
        """Notes the end of an admitted request; one that does not count is left out."""
        if principal.label and counts:
            self._requests.labels(principal.label).inc()
            self._tokens.labels(principal.label).inc(tokens)

    def refused(self, principal: Principal, name: LimitName) -> None:
        """Notes a refused request."""
        self._refused.labels(principal.label, name.value).inc()


class CostMetrics(Collector):
    """Device time and computed tokens of each key; without keys, one key with an empty name."""

    def __init__(self, registry: CollectorRegistry, costs: CostBook) -> None:
        self._costs = costs
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        labels = ["key", "work"]
        seconds = CounterMetricFamily(
            "neaptide_key_device_seconds", "Device time of an API key's chats, flex requests or batches.", labels=labels
        )
        tokens = CounterMetricFamily(
            "neaptide_key_computed_tokens",
            "Number of tokens that the device has computed for an API key.",
            labels=[*labels, "phase"],
        )
        for (key, work), cost in self._costs.totals.items():
            seconds.add_metric([key, work], cost.device_s)
            tokens.add_metric([key, work, "prefill"], cost.prefill_tokens)
            tokens.add_metric([key, work, "decode"], cost.decode_tokens)
        yield seconds
        yield tokens

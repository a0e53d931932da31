"""Prometheus series of the gateway."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from neaptide.cluster.gateway.replicas import Replica, ReplicaStatus


class ReplicaLives(Collector):
    """Number of starts of each replica, read when scraped."""

    def __init__(self, registry: CollectorRegistry, num_lives: Mapping[str, int]) -> None:
        self._num_lives = num_lives
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the exposition."""
        starts = CounterMetricFamily(
            "neaptide_cluster_replica_starts", "Number of times that a replica has been started.", labels=["replica"]
        )
        for name, count in self._num_lives.items():
            starts.add_metric([name], count)
        yield starts


class GatewayMetrics:
    """The gateway's series. Label ``replica`` is the replica's name in the cluster."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._replicas = Gauge(
            "neaptide_cluster_replicas", "Number of replicas, by state.", ["state"], registry=registry
        )
        self._ready = Gauge(
            "neaptide_cluster_replica_ready",
            "1 while a replica takes new online work, else 0.",
            ["replica"],
            registry=registry,
        )
        self._in_flight = Gauge(
            "neaptide_cluster_requests_in_flight",
            "Number of requests that were forwarded to a replica and have not ended.",
            ["replica"],
            registry=registry,
        )
        self._passed_on = Counter(
            "neaptide_cluster_requests_total",
            "Number of requests that were forwarded to a replica.",
            ["replica"],
            registry=registry,
        )
        self._lost = Counter(
            "neaptide_cluster_lost_requests_total",
            "Number of requests that were forwarded to a replica and lost before their answer ended.",
            ["replica"],
            registry=registry,
        )
        self._slack = Gauge(
            "neaptide_cluster_free_slack_seconds",
            "Part of the TTFT target that a replica has left for new prompts, by its last report.",
            ["replica"],
            registry=registry,
        )

    def passed_on(self, replica: Replica) -> None:
        self._passed_on.labels(replica.name).inc()

    def lost(self, replica: Replica) -> None:
        self._lost.labels(replica.name).inc()

    def refresh(self, replicas: Iterable[Replica]) -> None:
        """Updates the gauges; to be called before a scrape."""
        counts = dict.fromkeys(ReplicaStatus, 0)
        # A replica that has left must not keep its series.
        for gauge in (self._ready, self._in_flight, self._slack):
            gauge.clear()
        for replica in replicas:
            counts[replica.state] += 1
            self._ready.labels(replica.name).set(replica.state is ReplicaStatus.READY)
            self._in_flight.labels(replica.name).set(replica.num_in_flight)
            if replica.figures is not None:
                self._slack.labels(replica.name).set(replica.figures.free_slack_ms / 1e3)
        for state, count in counts.items():
            self._replicas.labels(state.value).set(count)

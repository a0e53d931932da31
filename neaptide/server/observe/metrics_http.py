"""Series of one HTTP server: its exchanges and its connections."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

E2E_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
ENDS = ("request", "header", "body", "linger", "slow_reader", "malformed", "idle", "refused")
"""Reasons for which the server ends a connection."""
OURS, OF_A_GATEWAY = "neaptide", "neaptide_cluster"
"""Name prefixes. A gateway's page has the series of its replicas next to its own."""
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"})


class HttpMetrics:
    """Metrics of one HTTP server.

    Args:
        prefix: prefix of the names.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str = OURS) -> None:
        self._requests = Counter(
            f"{prefix}_http_requests_total", "Number of HTTP replies.", ["method", "route", "code"], registry=registry
        )
        self._seconds = Histogram(
            f"{prefix}_http_request_seconds",
            "Time from the headers of an HTTP request to the end of its reply.",
            ["method", "route"],
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )
        self.connections = Gauge(f"{prefix}_connections", "Number of open client connections.", registry=registry)
        self._ended = Counter(
            f"{prefix}_connections_ended_total",
            "Number of connections that the server ended, by reason.",
            ["reason"],
            registry=registry,
        )
        self.listeners: list[Callable[[str, str, int, float], None]] = []
        """Called like ``on_http``, with the counted method."""
        for reason in ENDS:  # A rate counts only from a series' first sample.
            self._ended.labels(reason)

    def on_http(self, method: str, route: str, status: int, seconds: float) -> None:
        """Notes a reply. ``route`` is the route's template, never the caller's path."""
        method = method if method in _METHODS else "OTHER"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)
        for listener in self.listeners:
            listener(method, route, status, seconds)

    def on_ended(self, reason: str) -> None:
        """Notes that the server ended a connection; ``reason`` is one of ``ENDS``."""
        self._ended.labels(reason).inc()

"""Series of API keys. Their label is one of the operator's keys, never what a caller sends."""

from prometheus_client import CollectorRegistry, Counter

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

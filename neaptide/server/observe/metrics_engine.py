"""Series of the engine's current state, read from ``EngineState`` at each scrape."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from neaptide.server.engine_client.engine_state import EngineState

CLASSES = ("online", "offline")
BLOCK_STATES = ("free", "cached", "online", "offline")
_OF_THE_LAST_STEP = (
    ("predicted_s", "neaptide_step_predicted_seconds", "Time that was predicted for the last step."),
    ("margin_s", "neaptide_step_margin_seconds", "Safety margin on the predicted time of the last step."),
    ("budget_s", "neaptide_step_budget_seconds", "Time that the last step was allowed to take."),
)
"""Fields of ``StepStats``, with their series and help."""


class EngineMetrics(Collector):
    """Gauges of the engine. Without an engine, all but the first three are 0."""

    def __init__(self, registry: CollectorRegistry, engine: EngineState) -> None:
        self._engine = engine
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily(
            "neaptide_engine_up",
            "1 while an engine is attached; 0 while it starts or after its end.",
            engine.is_up,
        )
        yield CounterMetricFamily(
            "neaptide_engine_starts", "Number of times that an engine has become ready.", engine.num_ready
        )
        yield GaugeMetricFamily(
            "neaptide_engine_state_age_seconds",
            "Time since the engine last reported its state, started or ended.",
            engine.age_s,
        )
        yield self._gauge(
            "neaptide_requests_running", "Number of requests that run in the engine.", "class", "running", CLASSES
        )
        yield self._gauge(
            "neaptide_requests_waiting", "Number of requests that wait in the engine.", "class", "waiting", CLASSES
        )
        yield self._gauge("neaptide_kv_blocks", "Number of KV blocks in each state.", "state", "blocks", BLOCK_STATES)
        yield GaugeMetricFamily(
            "neaptide_kv_reserved_blocks",
            "Number of KV blocks reserved for online work, including those that it holds now.",
            engine.occupancy.blocks_reserved,
        )
        for field, name, text in _OF_THE_LAST_STEP:
            value = 0.0 if engine.last_step is None else getattr(engine.last_step, field)
            yield GaugeMetricFamily(name, text, value)

    def _gauge(self, name: str, text: str, label: str, field: str, values: tuple[str, ...]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[label])
        for value in values:
            family.add_metric([value], getattr(self._engine.occupancy, f"{field}_{value}"))
        return family

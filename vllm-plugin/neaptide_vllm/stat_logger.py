"""Puts the scheduler's metrics into vLLM's ``/metrics``: a plug-in of vLLM's group ``vllm.stat_logger_plugins``."""

from dataclasses import fields
from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

import neaptide_vllm
from neaptide_vllm.series import CARRIER, PREFIX, SERIES

logger = init_logger("vllm.neaptide")


@cache
def _metrics() -> dict[str, Counter | Gauge]:
    """Prometheus metrics by name, registered once in a process."""
    found: dict[str, Counter | Gauge] = {}
    for series in SERIES.values():
        if series.metric not in found:
            labels = ["engine", *(label for label, _ in series.labels)]
            if series.is_counter:
                found[series.metric] = Counter(series.metric, series.help, labels)
            else:
                found[series.metric] = Gauge(series.metric, series.help, labels, multiprocess_mode="mostrecent")
    return found


def is_asked_for(vllm_config: VllmConfig) -> bool:
    """Whether ``--scheduler-cls`` names our scheduler. vLLM loads this plug-in wherever the package is installed."""
    scheduler = vllm_config.scheduler_config.scheduler_cls
    return str(getattr(scheduler, "__module__", scheduler)).startswith(neaptide_vllm.__name__)


def can_carry() -> bool:
    """Whether this version of vLLM has what brings the series from the engine's process."""
    return CARRIER in {field.name for field in fields(SchedulerStats)}


class NeaptideStatLogger(StatLoggerBase):
    """One for each engine: series at 0 until the engine sends something.

    There are none without our scheduler, and none where vLLM cannot carry them.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._children: dict[str, Counter | Gauge] = {}
        if not is_asked_for(vllm_config):
            return
        if not can_carry():
            logger.warning("neaptide: this version of vLLM cannot carry our series to /metrics")
            return
        metrics = _metrics()
        self._children = {
            PREFIX + name: metrics[series.metric].labels(str(engine_index), *(value for _, value in series.labels))
            for name, series in SERIES.items()
        }

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if not self._children or scheduler_stats is None:
            return
        counts = getattr(scheduler_stats, CARRIER)
        for name in [name for name in counts if name.startswith(PREFIX)]:
            value = counts.pop(name) * SERIES[name.removeprefix(PREFIX)].scale
            child = self._children[name]
            if isinstance(child, Counter):
                child.inc(value)
            else:
                child.set(value)

    def log_engine_initialized(self) -> None:
        pass

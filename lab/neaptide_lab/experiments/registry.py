"""The experiments by name.

Each is a module below this package with ``NAME``, ``ABOUT`` (one line) and ``run(quick) -> ExperimentResult``. A module
must import quickly, since ``neaptide experiment list`` imports them all: torch belongs inside ``run``.

One that takes longer than some seconds says which part runs now, for the command to show:
``logging.getLogger(__name__).info("policy fcfs")``.
"""

import logging
from importlib import import_module
from typing import Protocol

from neaptide_lab.experiments.result import ExperimentResult

_MODULES = {
    "golden": "golden",
    "cost-model-error": "cost_model_error",
    "forecast-coverage": "forecast_coverage",
    "headroom": "headroom",
    "sim-fidelity": "sim_fidelity",
    "baseline-sanity": "baseline_sanity",
    "overload": "overload",
    "step-lengths": "step_lengths",
    "echo-throughput": "echo.throughput",
    "bros-latency": "bros.latency",
    "bros-slo": "bros.slo",
    "bros-rt-only": "bros.rt_only",
    "bros-bicache": "bros.bicache",
    "scheduler-overhead": "bros.overhead",
    "echo-slo": "echo.slo",
    "echo-hit-rate": "echo.hit_rate",
    "echo-timeline": "echo.timeline",
    "tuned-rivals": "rivals.sweep",
    "clairvoyant": "limits.clairvoyant",
    "two-steps": "limits.two_steps",
    "fair-shares": "jobs.shares",
    "batch-deadlines": "jobs.deadlines",
    "ablation": "ablation",
    "why-late": "why_late",
    "quotes": "quotes.experiment",
    "batchllm-saving": "batchllm.saving",
    "batchllm-micro": "batchllm.micro",
    "batchllm-industry": "batchllm.industry",
    "batchllm-sweep": "batchllm.sweep",
    "batchllm-valleys": "batchllm.valleys",
    "cache-bound": "batchllm.cache_bound",
    "planning-time": "planning.planning_time",
    "blend-sharing": "blend.sharing",
    "blend-partition": "planning.partition",
    "blend-sampling": "planning.sampling",
    "blend-throughput": "blend.throughput",
    "blend-grid": "blend.grid",
    "blend-overlap": "blend.overlap",
    "blend-usage": "blend.usage",
    "blend-models": "blend.models",
    "blend-mixes": "blend.mixes",
    "blend-dp": "blend.parallel",
    "blend-live": "blend.live",
    "stop-between-layers": "w5.stop_between_layers",
    "cluster-scaling": "cluster.scaling",
    "cluster-routing": "cluster.routing",
    "cluster-day": "cluster.day",
}
EXPERIMENT_NAMES = tuple(_MODULES)
"""As on the command line."""

LOGGER = logging.getLogger("neaptide_lab.experiments")
"""Above the loggers of the experiments' modules."""


class Experiment(Protocol):
    NAME: str
    ABOUT: str

    def run(self, quick: bool) -> ExperimentResult:
        """``quick`` takes smaller samples, at the same definitions."""
        ...


def load_experiment(name: str) -> Experiment:
    """Raises:
    KeyError: there is no experiment of that name.
    """
    module: Experiment = import_module(f"neaptide_lab.experiments.{_MODULES[name]}")
    return module

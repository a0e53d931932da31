"""The experiments by name.

Each is a module of this package with ``NAME``, ``ABOUT`` (one line) and ``run(quick) -> ExperimentResult``. A module
must import quickly, since ``neaptide experiment list`` imports them all: torch belongs inside ``run``.

One that takes longer than some seconds says which part runs now, for the command to show:
``logging.getLogger(__name__).info("policy fcfs")``.
"""

import logging
from importlib import import_module
from typing import Protocol

from neaptide.experiments.result import ExperimentResult

EXPERIMENT_NAMES = (
    "golden",
    "cost-model-error",
    "forecast-coverage",
    "sim-fidelity",
    "baseline-sanity",
    "overload",
    "echo-throughput",
    "tuned-rivals",
)
"""As on the command line; ``sim-fidelity`` is the module ``sim_fidelity``."""

LOGGER = logging.getLogger("neaptide.experiments")
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
    if name not in EXPERIMENT_NAMES:
        raise KeyError(name)
    module: Experiment = import_module(f"neaptide.experiments.{name.replace('-', '_')}")
    return module

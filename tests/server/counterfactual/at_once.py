"""The child that simulates, but at the usual priority and without rests: where tests keep all cores busy the real one
waits for its turn for minutes.

``python -m tests.server.counterfactual.at_once PARENT_PID``
"""

import contextlib
from pathlib import Path

import pytest

from neaptide.launch import simulating, simulation_answers
from neaptide.server.counterfactual import gauge, service


def simulate_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all that is built from now on."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # only our package is installed
    for module in (gauge, service):
        monkeypatch.setattr(module, "CHILD", __name__)


if __name__ == "__main__":
    simulating.set_idle_priority = lambda niceness, is_idle=False: None
    simulation_answers.in_bursts = contextlib.nullcontext
    simulating.main()

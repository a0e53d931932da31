"""The experiment of figures 8 and 10 of Echo: what it notes of an engine, and its rows on made-up steps."""

from pathlib import Path

import numpy as np
import pytest

from neaptide_lab.experiments.echo import timeline as experiment
from tests.engine.harness import Harness, batch, online


def test_it_notes_who_computes_and_who_holds_the_memory(tmp_path: Path) -> None:
    engine, watch = Harness(num_blocks=32, policy="echo"), experiment.Timeline()
    engine.core.subscribe(watch)
    engine.core.handle(online("chat", [7] * 9, max_tokens=1))
    engine.core.handle(batch(tmp_path, "job", [[8] * 12], max_tokens=2))
    engine.run()
    # Steps of 10 ms. The chat's two full blocks stay cached; the row holds three blocks, then four, and leaves three.
    columns = experiment.Timeline.columns(watch, (-1.0, 9.0))
    assert columns["end_s"].tolist() == pytest.approx([0.01, 0.02])
    assert (columns["online"].tolist(), columns["offline"].tolist()) == ([1.0, 0.0], [1.0, 1.0])
    memory = {name: (32 * columns[name]).tolist() for name in experiment.MEMORY}
    assert memory == {
        "held_online": [0.0, 0.0],
        "held_offline": [3.0, 0.0],
        "online_free": [2.0, 2.0],
        "offline_free": [0.0, 3.0],
        "empty": [27.0, 27.0],
    }
    assert len(watch.columns((0.015, 9.0))["end_s"]) == 1


def steps(online_parts: list[float], offline_parts: list[float], held: list[float]) -> dict[str, experiment.Column]:
    made = {name: np.zeros(len(held)) for name in experiment.COLUMNS}
    made |= {
        "end_s": np.arange(len(held)) / 2.0,
        "online": np.array(online_parts),
        "offline": np.array(offline_parts),
        "held_offline": np.array(held),
        "empty": 1.0 - np.array(held),
    }
    return made


def test_the_mean_of_every_second_is_correlated() -> None:
    made = steps([1, 3, 4, 4, 6, 6], [9, 7, 6, 6, 4, 4], [0.4, 0.6, 0.6, 0.7, 0.7, 0.8])
    seconds = experiment._by_second(made)
    assert (seconds["second"].tolist(), seconds["online"].tolist()) == ([0.0, 1.0, 2.0], [2.0, 4.0, 6.0])
    rows = experiment._rows(dict.fromkeys(experiment.POLICIES, made), dict.fromkeys(experiment.POLICIES, seconds))
    assert {row.case: (round(row.ours, 6), row.paper) for row in rows if row.case.startswith("echo")} == {
        "echo: correlation of active online and offline requests": (-1.0, None),
        "echo: memory held by running requests, median": (65.0, 50.0),
        "echo: steps in which they hold more than half": (83.333333, None),
        "echo: memory held_online, mean": (0.0, None),
        "echo: memory held_offline, mean": (63.333333, None),
        "echo: memory online_free, mean": (0.0, None),
        "echo: memory offline_free, mean": (0.0, None),
        "echo: memory empty, mean": (36.666667, None),
    }


def test_what_never_changes_is_not_correlated() -> None:
    assert experiment._correlation(np.ones(3), np.arange(3.0)) == 0.0

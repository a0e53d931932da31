"""The benchmark of two servers on one database, small."""

import json

import pytest

from lab.benchmarks import shared_batches
from lab.benchmarks.shared_batches import Figures, Look, figures
from tests.postgres import PostgresServer


def test_ratios_are_those_of_medians() -> None:
    def runs(*rates: float, filled: float) -> list[Figures]:
        return [Figures(rate, filled, 10.0, 20.0, 30.0) for rate in rates]

    found = {
        "alone": runs(100.0, 90.0, 500.0, filled=0.8),
        "sharing": runs(99.0, 80.0, 120.0, filled=0.79),
        "two": runs(198.0, 1.0, 300.0, filled=0.5),
    }
    said = shared_batches.result(found)
    assert said["sharing"] == {
        "lines_per_s": 99.0,
        "filled": 0.79,
        "api_ms": 10.0,
        "children_ms": 20.0,
        "database_ms": 30.0,
    }
    ratios = {name: said[name] for name in ("two_over_one", "claimed_over_alone", "claimed_over_alone_in_steps")}
    assert ratios == {"two_over_one": 2.0, "claimed_over_alone": 0.99, "claimed_over_alone_in_steps": 0.9875}
    del found["alone"]
    assert shared_batches.result(found)["claimed_over_alone"] is None


def test_figures_are_of_what_happened_between_two_looks_and_steps_of_the_whole_run() -> None:
    """64 seats, 10 tokens a line: 600 lines are 93.75 full steps."""
    first = Look(at_s=10.0, lines=100, steps=20, api_s=1.0, children_s=5.0, database_s=2.0)
    last = Look(at_s=30.0, lines=600, steps=125, api_s=2.0, children_s=5.5, database_s=2.25)
    assert figures(first, last, 10, 64) == Figures(25.0, 0.75, 2000.0, 1000.0, 500.0)


@pytest.mark.full
def test_all_forms_run_a_batch(postgres_server: PostgresServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--store", postgres_server.url("postgres"), "--lines", "1000", "--turns", "1", "--step-ms", "20"]
    assert shared_batches.main([*arguments, "--output-tokens", "8"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for form in shared_batches.FORMS:
        assert 0.0 < found[form]["filled"] <= 1.0
        assert found[form]["lines_per_s"] > 0

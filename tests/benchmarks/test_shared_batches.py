"""The benchmark of two servers on one database, small."""

import json

import pytest

from benchmarks import shared_batches
from tests.postgres import PostgresServer


def test_ratios_are_those_of_medians() -> None:
    found = {"alone": [100.0, 90.0, 500.0], "sharing": [99.0, 80.0, 120.0], "two": [198.0, 1.0, 300.0]}
    assert shared_batches.result(found) == {
        "lines_per_s": {"alone": 100.0, "sharing": 99.0, "two": 198.0},
        "two_over_one": 2.0,
        "claims_cost": 0.01,
        "turns": 3,
    }


@pytest.mark.full
def test_all_forms_run_a_batch(postgres_server: PostgresServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--store", postgres_server.url("postgres"), "--lines", "200", "--turns", "1", "--step-ms", "5"]
    assert shared_batches.main([*arguments, "--output-tokens", "8"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(rate > 0 for rate in found["lines_per_s"].values())

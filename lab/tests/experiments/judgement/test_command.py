"""The command, on runs that are made by hand."""

import argparse
import json
from pathlib import Path

import pytest

from lab.tests.experiments.judgement.runs_by_hand import figures
from neaptide_lab.experiments.judgement import command, runs
from neaptide_lab.experiments.judgement.runs import Outcome, Run

CELL = "w5 cpu-111m-2026-11-24 0.1 seed 0"


def status(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["judgement", *words])
    found: int = args.func(args)
    return found


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the policies that are run. With 512 tokens a point less is attained."""
    policies: list[str] = []

    def simulate(run: Run) -> Outcome:
        policies.append(run.policy)
        return figures(attained=0.89 if "512" in run.policy else 0.9)

    monkeypatch.setattr(runs, "in_a_process", simulate)
    return policies


def test_policies_are_compared_and_the_last_line_is_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: list[str]
) -> None:
    words = ("--cells", CELL, "--policies", "neaptide", "neaptide@512", "--cache", str(tmp_path), "--jobs", "1")
    assert status(*words) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["run"] == 2
    assert line["summary"]["neaptide@512 w5: ALL"]["points"] == [1.0, 1.0, 1.0]
    assert simulated == ["neaptide", "neaptide@512"]
    assert status(*words, "--json", str(tmp_path / "out")) == 0
    assert simulated == ["neaptide", "neaptide@512"]
    assert json.loads((tmp_path / "out").read_text())["cells"][CELL]["neaptide@512"]["attained"] == 0.89


def test_only_what_is_kept_is_shown_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], simulated: list[str]
) -> None:
    assert status("--cells", CELL, "--kept-only", "--cache", str(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] == 0
    assert simulated == []


def test_the_cells_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--list", "--group", "bros", "--cells", "OPT-13B") == 0
    assert len(capsys.readouterr().out.splitlines()) == 10


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--cells", "nothing"), "there is no such cell"),
        (("--caps", "before"), "go with --before"),
        (("--policies", "before:bros"), "go with --before"),
        (("--quick", "--set", "report"), "of the calibration set"),
    ],
)
def test_what_cannot_be_done_is_refused(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*words) == 2
    assert complaint in capsys.readouterr().err

"""``neaptide adversary``."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab.tests.adversary.cases import CASE
from neaptide.cli import main
from neaptide_lab.adversary import command, found
from neaptide_lab.adversary import search as search_module
from neaptide_lab.adversary.case import Case
from neaptide_lab.adversary.found import Found, read_found, write_found
from neaptide_lab.adversary.promises import PROMISES, Breach


def always(amount: float) -> object:
    def judged(promise: str, policy: str, case: Case, siblings: int = 1) -> Breach:
        return Breach(amount, f"{promise} of {policy}")

    return judged


def judge_by(monkeypatch: pytest.MonkeyPatch, amount: float) -> None:
    for module in (search_module, command, found):
        monkeypatch.setattr(module, "judged", always(amount))


def test_a_broken_promise_is_shrunk_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge_by(monkeypatch, 0.25)
    profile = "a100-40g-llama-3.1-8b"
    words = ["adversary", "--promise", "cap", "--tries", "4", "--seed", "7", "--profile", profile]
    assert main([*words, "--out", str(tmp_path)]) == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    (result,) = line["results"]
    written = read_found(Path(result["file"]))
    assert Path(result["file"]) == tmp_path / "cap-neaptide-plain-7.json"
    assert (written.promise, written.policy, written.siblings, written.known) == ("cap", "neaptide", 3, "")
    assert len(written.case.chats) + len(written.case.rows) == 1
    assert (line["policy"], line["seed"]) == ("neaptide", 7)
    assert (result["promise"], result["broken"], result["amount"], result["tries"]) == ("cap", True, 0.25, 4)
    assert result["requests"] == written.case.num_requests


def test_promises_that_hold_write_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge_by(monkeypatch, -0.25)
    assert main(["adversary", "--tries", "4", "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [result["promise"] for result in line["results"]] == list(PROMISES)
    assert not any(result["broken"] for result in line["results"])


@pytest.mark.parametrize(("amount", "status"), [(0.1, 1), (-0.1, 0)])
def test_a_found_case_is_replayed_under_another_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], amount: float, status: int
) -> None:
    judge_by(monkeypatch, amount)
    case = Found(promise="late", policy="neaptide", about="", siblings=1, case=CASE)
    write_found(case, tmp_path / "one.json")
    write_found(replace(case, promise="cap"), tmp_path / "two.json")
    assert main(["adversary", "--replay", str(tmp_path), "--policy", "fcfs", "--promise", "late"]) == status
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["replayed"] == [{"case": "one", "promise": "late", "amount": amount, "text": "late of fcfs"}]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--promise", "lat"], "there is no promise 'lat'; there are: late, cap, share, pingpong, wait, failure, all"),
        (["--tries", "0"], "--jobs and --tries must be at least 1"),
        (["--profile", "abacus"], "no profile 'abacus'"),
    ],
)
def test_impossible_requests_get_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adversary", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"neaptide adversary: {complaint}")


def test_a_file_that_is_no_case_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert main(["adversary", "--replay", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"neaptide adversary: {path}: not a found case")

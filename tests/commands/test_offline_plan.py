"""``neaptide offline-plan``."""

import json
from pathlib import Path
from typing import Any

import pytest

from neaptide.cli import main

PREFIX = "p" * 640
OTHER = "q" * 320


def batch(path: Path, prompts: list[str], first: int = 0) -> Path:
    lines = [
        {"custom_id": f"line-{first + k}", "body": {"prompt": prompt, "max_tokens": 8}}
        for k, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def planned(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert main(["offline-plan", *map(str, words)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_batch_file_is_ordered_by_what_it_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = batch(tmp_path / "in.jsonl", [f"{PREFIX}a", f"{OTHER}b", f"{PREFIX}c", f"{OTHER}d", "alone" * 64])
    found = planned(capsys, path, "--order", tmp_path / "out.txt", "--json", tmp_path / "out.json")
    assert (tmp_path / "out.txt").read_text().split() == ["line-0", "line-2", "line-1", "line-3", "line-4"]
    assert json.loads((tmp_path / "out.json").read_text()) == found
    # 160, 80 and 80 tokens of text (four characters each); the former two stand there twice, to the token, and of a
    # prompt that is cached whole the last block is computed again.
    assert (found["requests"], found["tokens"]) == (5, 560)
    assert found["tree"] == {"nodes": 2, "depth": 1}
    assert found["sharing"]["bound"] == found["sharing"]["order"] == pytest.approx((144 + 64) / 560)
    assert found["groups"] == 3
    assert found["density"]["root"] > 0
    assert found["replicas"][0]["requests"] == 5


def test_the_order_as_handed_in_shares_as_much_in_a_cache_that_is_large_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = batch(tmp_path / "in.jsonl", [f"{PREFIX}a", f"{OTHER}b", f"{PREFIX}c"])
    found = planned(capsys, path, "--policy", "fcfs", "--order", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text().split() == ["line-0", "line-1", "line-2"]
    assert found["sharing"]["order"] == found["sharing"]["bound"]
    assert found["groups"] == 3


def test_replicas_get_a_file_each_and_every_line_is_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = batch(tmp_path / "one.jsonl", [f"{PREFIX}{k}" for k in range(6)])
    second = batch(tmp_path / "two.jsonl", [f"{k}{OTHER}" for k in range(6)], first=6)
    words = (first, second, "--policy", "neaptide", "--replicas", "2", "--order", tmp_path / "out.txt")
    found = planned(capsys, *words)
    parts = [(tmp_path / f"out.{k}.txt").read_text().split() for k in range(2)]
    assert sorted([*parts[0], *parts[1]]) == sorted(f"line-{k}" for k in range(12))
    assert [one["requests"] for one in found["replicas"]] == list(map(len, parts))


def test_sets_go_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "batchllm-64-16-s4", "--policy", "neaptide", "--profile", "a100-80g-llama-3.1-8b")
    assert found["requests"] == 6400
    assert found["sharing"]["order"] == found["sharing"]["bound"] == pytest.approx(0.6)
    assert found["groups"] == 1600


@pytest.mark.parametrize(
    ("line", "words", "said"),
    [
        (
            {"custom_id": "a", "body": {"prompt": "x"}},
            ["--policy", "best"],
            "there is no order 'best'; there are:",
        ),
        ({"custom_id": "a", "body": {"prompt": "x"}}, ["--replicas", "0"], "--replicas must be 1 to 1024"),
        ({"custom_id": "a", "body": {"prompt": "x"}}, ["--profile", "abacus"], "no profile 'abacus'"),
        ({"custom_id": "a", "body": {"prompt": "x"}}, ["--order", "/no/such/place"], "/no/such: no such directory"),
        ({"body": {"prompt": "x"}}, [], "line 1: custom_id must be a non-empty string of one line"),
        (
            {"custom_id": "a\nb", "body": {"prompt": "x"}},
            [],
            "line 1: custom_id must be a non-empty string of one line",
        ),
        ({"custom_id": "a"}, [], "line 1: not a request: 'body' is missing"),
    ],
)
def test_bad_input_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: dict[str, Any], words: list[str], said: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert main(["offline-plan", str(path), *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.startswith("neaptide offline-plan: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "said"), [("nowhere", "no offline set 'nowhere'"), ("empty.jsonl", "has no requests")]
)
def test_nothing_to_plan_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    assert main(["offline-plan", name]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_lines_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [batch(tmp_path / name, ["x" * 64]) for name in ("one.jsonl", "two.jsonl")]
    assert main(["offline-plan", *map(str, paths)]) == 2
    assert "custom_id 'line-0' occurs 2 times" in capsys.readouterr().err

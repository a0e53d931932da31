"""``neaptide simulate --replicas`` from the outside."""

import json
from pathlib import Path

import pytest

from neaptide.cli import main
from neaptide.estimator.device_profile import save_profile
from tests.simulation.scenes import profile
from tests.simulation.test_simulate_command import KEYS, TRACE

CLUSTER_KEYS = {"placement", "router", "replica_hours", "failed_online", "rows", "replicas", "sizes"}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "trace.csv").write_text(TRACE)
    save_profile(profile(num_blocks=64, block_size=16), tmp_path / "profile.json")
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x" * 99}]}
    lines = [{"custom_id": str(k), "method": "POST", "url": "/v1/chat/completions", "body": body} for k in range(30)]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"--profile": "profile.json", "--online": "trace.csv", "--offline": "batch.jsonl"}
    return [
        "simulate",
        "--speed",
        "8",
        *(text for flag, name in files.items() for text in (flag, str(tmp_path / name))),
    ]


def test_the_whole_comes_under_the_usual_keys_with_each_replica_beside_it(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--replicas", "2", "--router", "round-robin", "--json", str(tmp_path / "out.json")]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    result = json.loads(last)
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert result.keys() == KEYS.keys() | CLUSTER_KEYS
    assert result["online"]["requests"] == 4
    assert [one["online"]["requests"] for one in result["replicas"]] == [2, 2]
    assert result["rows"]["done"] > 0
    for name in ("replica-0", "replica-1"):
        assert any(line.strip().startswith(name) for line in table)
    assert any(line.startswith("router round-robin, placement claims, ") for line in table)
    assert max(map(len, table)) <= 80


def test_a_fleet_that_changes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--autoscale", "1:3", "--lose-at", "0.1", "--start-up-s", "0.1", "--deadline-s", "60"]
    assert main([*arguments, *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["replicas"][0]["state"] == "lost"
    assert result["offline"]["deadline_misses"] == 0


def test_policies_are_compared_on_a_cluster(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--policy", "fcfs,neaptide", "--replicas", "2"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [len(result["replicas"]) for result in results] == [2, 2, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], "--replicas must be from 1 to"),
        (["--replicas", "100000"], "--replicas must be from 1 to"),
        (["--router", "slack"], "need --replicas or --autoscale"),
        (["--replicas", "2", "--router", "best"], "there is no router 'best'; there are: slack"),
        (["--replicas", "2", "--placement", "best"], "there is no placement 'best'; there are: claims, partition"),
        (["--replicas", "2", "--placement", "partition", "--lose-at", "1"], "needs claims"),
        (["--replicas", "2", "--lose-at", "nan"], "--lose-at must be at least 0"),
        (["--replicas", "2", "--start-up-s", "-1"], "times of a fleet"),
        (["--replicas", "2", "--start-up-s", "inf"], "times of a fleet"),
        (["--autoscale", "three"], "--autoscale must be MIN:MAX replicas, such as 1:8, not 'three'"),
        (["--autoscale", "3:2"], "1 to N replicas, not 3 to 2"),
        (["--autoscale", "2:4"], "cannot start with 1"),
        (["--replicas", "2", "--offline", "bros-be"], "replicas cannot share it"),
        (["--replicas", "2", "--explain", "3"], "use them with --replicas 1"),
        (["--deadline-s", "0"], "--deadline-s must be positive"),
    ],
)
def test_bad_input_is_one_clear_line(
    flags: list[str], message: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1

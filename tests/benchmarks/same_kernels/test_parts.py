"""W5 of ``benchmarks.same_kernels`` in parts, each a process of its own; without servers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import same_kernels
from benchmarks.live import late
from benchmarks.live.plan import Plan, Window
from benchmarks.vllm_server import Rival
from neaptide.loadgen.client.recorder import ChatRecord


def window(pace_s: float, offline_tokens_per_s: float = 0.0) -> Window:
    """Two chats, the second with this time a token."""
    records = [
        ChatRecord(at_s, arrival_s=at_s, token_times_s=[at_s + 0.1, at_s + 0.1 + 31 * tpot_s], num_output_tokens=32)
        for at_s, tpot_s in ((1.0, 0.025), (2.0, pace_s))
    ]
    return Window(1.0, offline_tokens_per_s=offline_tokens_per_s, records=records)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What was run, with the rate of online requests."""
    seen: list[tuple[str, float]] = []

    async def run(plan: Plan, flags: list[str], *, online: bool, offline: bool, **more: Any) -> Window:
        seen.append((f"ours {online} {offline}", round(plan.rate_rps, 6)))
        return window(0.05, 800.0) if offline else window(0.025)

    async def run_rival(plan: Plan, machine: Any, rival: Rival, *, offline: bool) -> Window:
        seen.append((f"{rival.name} {offline}", round(plan.rate_rps, 6)))
        return window(0.5, 900.0) if offline else window(0.03)

    monkeypatch.setattr(same_kernels, "run", run)
    monkeypatch.setattr(late, "run", run)
    monkeypatch.setattr(same_kernels, "run_rival", run_rival)
    monkeypatch.setattr(same_kernels, "check_texts", lambda *args: 48)
    return seen


def play(monkeypatch: pytest.MonkeyPatch, model: Path, *arguments: str) -> None:
    command = ["same_kernels", "--vllm", "python", "--model", str(model), "--quick", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", [*command, *arguments])
    same_kernels.main()


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_the_parts_together_say_what_one_process_says(
    tmp_path: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, tmp_path)
    whole, of_whole = last_line(capsys), list(served)
    served.clear()
    for part in same_kernels.PARTS:
        before = len(served)
        play(monkeypatch, tmp_path, "--part", part, "--state", str(tmp_path / "state.json"))
        assert len(served) - before <= same_kernels.SERVERS_OF_A_PART
    assert last_line(capsys) == whole
    assert served == of_whole
    assert whole["ceiling"] == 800.0
    assert whole["loads"][0]["rate_rps"] == 1.0
    assert whole["loads"][0]["targets_ms"] == {"ttft": 300.0, "tpot": 60.0}


def test_loads_are_added_to_the_same_ceiling_and_dropped_with_it(
    tmp_path: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ("--state", str(tmp_path / "state.json"))
    play(monkeypatch, tmp_path, "--part", "ceiling", *state)
    for load in ("0.2", "0.4"):
        play(monkeypatch, tmp_path, "--part", "targets", "--loads", load, *state)
    found = last_line(capsys)
    assert [(runs["load"], runs["rate_rps"], runs["bars"]) for runs in found["loads"]] == [
        (0.2, 1.0, None),
        (0.4, 2.0, None),
    ]
    play(monkeypatch, tmp_path, "--part", "ceiling", *state)
    assert last_line(capsys)["loads"] == []


@pytest.mark.parametrize(("part", "missing"), [("targets", "ceiling"), ("ours", "ceiling"), ("rivals", "targets")])
def test_a_part_names_the_one_that_it_builds_on(
    part: str, missing: str, tmp_path: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ("--state", str(tmp_path / "state.json"))
    if missing == "targets":
        play(monkeypatch, tmp_path, "--part", "ceiling", *state)
    with pytest.raises(SystemExit, match=f"run --part {missing} .*first: it sets"):
        play(monkeypatch, tmp_path, "--part", part, *state)


def test_a_part_needs_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        play(monkeypatch, tmp_path, "--part", "ours")

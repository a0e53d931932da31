"""``benchmarks.live_coserving`` whose servers are made up: what is measured in which order, and what a run that ends
before its end prints and draws."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks import live_coserving
from benchmarks.live import engines, late, measure
from benchmarks.live.plan import Plan, Window
from neaptide.commands.server_process import ServerDiedError
from neaptide.loadgen.client.recorder import ChatRecord

RUNS = ("ceiling", "probe", "online alone", "capped", "both", "1.2", "4.8", "priority", "fcfs", "as slow")
"""Of the medium form, in this order."""
OFFLINE = {
    "ceiling": 1000.0,
    "capped": 800.0,
    "both": 600.0,
    "1.2": 200.0,
    "4.8": 700.0,
    "priority": 500.0,
    "fcfs": 900.0,
    "as slow": 850.0,
}
"""Tokens a second."""


@dataclass
class Servers:
    """Takes the place of what starts servers; ``end`` is called in place of run number ``ends_at``."""

    ends_at: int
    end: Callable[[], None]
    flags: list[Sequence[str]] = field(default_factory=list)
    logs: list[Path | None] = field(default_factory=list)

    async def check(self, plan: Plan, more_flags: Sequence[str] = ()) -> int:
        return 48

    async def run(
        self, plan: Plan, flags: Sequence[str], *, online: bool, offline: bool, step_log: Path | None = None
    ) -> Window:
        number = len(self.flags)
        if number == self.ends_at:
            self.end()
            await asyncio.Event().wait()
        self.flags.append(flags)
        self.logs.append(step_log)
        name = RUNS[number]
        assert (online, offline) == (name not in ("ceiling", "capped"), name not in ("probe", "online alone"))
        tpot_s = 0.02 + OFFLINE.get(name, 0.0) / 1e5
        record = ChatRecord(0.0, token_times_s=[0.1, 0.1 + tpot_s], num_output_tokens=2)
        records = [record] if online else []
        window = Window(online_tokens_per_s=200.0 if online else 0.0, records=records, mean_step_ms=40.0)
        window.offline_tokens_per_s = OFFLINE.get(name, 0.0)
        return window


def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_at: int, end: Callable[[], None], *more: str
) -> tuple[int, dict[str, Any], Servers]:
    """Exit status, last line, and what was started."""
    servers = Servers(ends_at, end)
    monkeypatch.setattr(measure, "run", servers.run)
    monkeypatch.setattr(late, "run", servers.run)
    monkeypatch.setattr(engines, "run", servers.run)
    monkeypatch.setattr(measure, "check", servers.check)
    monkeypatch.setattr(live_coserving, "model_111m", lambda: Path("111m"))
    out = tmp_path / "live.json"
    flags = ["--medium", "--no-predict", "--json", str(out), "--plot", str(tmp_path / "live.svg")]
    status = live_coserving.main([*flags, "--picture", str(tmp_path / "small.svg"), *more])
    return status, json.loads(out.read_text()), servers


def nothing() -> None:
    raise AssertionError("there is no such run")


def told_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_medium_form_measures_every_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, line, servers = shown(tmp_path, monkeypatch, len(RUNS), nothing)
    assert (status, line["cut_short"], len(servers.flags)) == (0, None, len(RUNS))
    assert line["ratios"] == {
        "share": 1.0,
        "share_uncapped": 0.75,
        "attainment_minus_alone": 0.0,
        "ttft_p99_vs_alone": 1.0,
        "ttft_p99_vs_rival": 1.0,
        "offline_vs_rival": 1.2,
    }
    (curve,) = line["curves"]
    assert {p["name"]: p["offline_tokens_per_s"] for p in curve["points"]} == {
        "target 1.2 x alone": 200.0,
        "target 2.4 x alone": 600.0,
        "target 4.8 x alone": 700.0,
        "as slow as rivals": 850.0,
        "priority": 500.0,
        "fcfs": 900.0,
    }
    tpot_targets_ms = [flags[flags.index("--tpot-slo-ms") + 1] for flags in servers.flags[-6:]]
    # The last is what streams got under `fcfs`, the slower of the rivals.
    assert [round(float(each), 6) for each in tpot_targets_ms] == [48.0, 24.0, 96.0, 48.0, 48.0, 29.0]


def test_step_logs_of_the_headlines_two_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, servers = shown(tmp_path, monkeypatch, len(RUNS), nothing, "--keep", str(tmp_path / "kept"))
    paths = [tmp_path / "kept" / f"load-0.2-seed-0-{name}" for name in ("alone", "beside")]
    logs = {RUNS[number]: log for number, log in enumerate(servers.logs) if log is not None}
    assert logs == dict(zip(("online alone", "both"), map(late.log_of, paths), strict=True))
    assert sorted((tmp_path / "kept").iterdir()) == [path.with_name(path.name + late.CHATS_SUFFIX) for path in paths]


ENDS = [
    number if number in (0, 2, 3, 5, 9) else pytest.param(number, marks=pytest.mark.full) for number in range(len(RUNS))
]
"""Always: before anything, on both sides of the first curve, of the first share, and at the last rival."""


@pytest.mark.parametrize("ends_at", ENDS)
def test_what_is_told_to_end_shows_what_it_has(ends_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, line, _ = shown(tmp_path, monkeypatch, ends_at, told_to_end)
    assert (status, line["cut_short"], line["checked_tokens"]) == (1, "stop signal", 48)
    assert line["ceilings_tokens_per_s"] == ({} if ends_at == 0 else {"neaptide": 1000.0})
    measured = [r["run"] for case in line["loads"] for r in case["runs"]]
    names = ("offline", "online alone", "offline, capped", "both", "target 1.2 x alone", "target 4.8 x alone")
    assert measured == ([] if ends_at < 2 else [*names, "priority", "fcfs"][: ends_at - 1])
    # A share wants the capped ceiling and the run itself.
    assert line["ratios"]["share"] == (1.0 if ends_at > 4 else None)
    points = [p["name"] for curve in line["curves"] for p in curve["points"]]
    assert len(points) == max(0, ends_at - 4)
    has_curve = ends_at > 2  # from online alone on
    assert [(tmp_path / name).exists() for name in ("live.svg", "small.svg")] == [has_curve, has_curve]
    if "priority" in points:
        assert "priority" in (tmp_path / "small.svg").read_text()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ServerDiedError("the server did not become ready"), "the server did not become ready"),
        (SystemExit("the batch ran out inside the window"), "the batch ran out inside the window"),
    ],
)
def test_a_run_that_fails_leaves_those_before(
    error: BaseException, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    status, line, _ = shown(tmp_path, monkeypatch, 6, fail)
    assert (status, line["cut_short"], line["ratios"]["share"]) == (1, reason, 1.0)


def test_a_fault_of_our_own_is_raised_behind_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        shown(tmp_path, monkeypatch, 5, fail)
    line = json.loads((tmp_path / "live.json").read_text())
    assert (line["cut_short"], line["ratios"]["share"]) == ("error", 1.0)


def test_a_limit_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that would not end."""
    status, line, servers = shown(tmp_path, monkeypatch, 0, lambda: None, "--limit-min", "0.001")
    assert (status, line["cut_short"], servers.flags) == (1, "time limit", [])

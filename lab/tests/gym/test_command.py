"""``neaptide gym`` from the outside."""

import argparse
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.tests.experiments.judgement.runs_by_hand import cell, figures
from neaptide_lab.experiments.judgement.runs import BOUND, ROOT, Failed, Outcome, Run, Tree, in_a_process
from neaptide_lab.experiments.judgement.worker import Figures
from neaptide_lab.gym import command
from neaptide_lab.gym import table as tables
from neaptide_lab.gym.loads import LOADS, cells
from neaptide_lab.gym.table import PAGE, POLICIES, GymTable, page

ATTAINED = {BOUND: 1.0, "neaptide": 0.95, "priority": 0.8, "fcfs": 0.5}
OFFLINE = {"neaptide": 500.0, "priority": 900.0, "fcfs": 2000.0}


def gym(*flags: str) -> int:
    """The command, also where it was installed before it had an entry point."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["gym", *flags])
    status: int = args.func(args)
    return status


def test_the_command_has_an_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["neaptide.commands"]["gym"] == f"{command.__name__}:add_parser"


def by_hand(run: Run) -> Figures:
    name = run.policy.partition("@")[0]
    return figures(
        attained=ATTAINED.get(name, 0.9),
        offline_tokens_per_s=OFFLINE.get(name, 800.0),
        offline_bound_tokens_per_s=None if name == BOUND else 2000.0,
        preempted_offline=3,
    )


@pytest.fixture
def run_gym(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """The command with simulations by hand, an empty table and a cache of its own."""
    monkeypatch.setattr(tables, "PATH", tmp_path / "table.json")
    monkeypatch.setattr(command, "GymTable", lambda: GymTable(tmp_path / "table.json"))
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")

    def run(*flags: str, simulate: Callable[[Run], Outcome] = by_hand) -> int:
        monkeypatch.setattr(command, "in_a_process", lambda run, **options: simulate(run))
        return gym(*flags, "--cache", str(tmp_path / "cache"))

    return run


def test_a_policy_gets_a_card_beside_its_rivals(
    run_gym: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.json")
    assert run_gym("run", "fcfs@512", "--quick", "--rivals", "--json", out) == 0
    shown, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
    result = json.loads(last)
    assert result == json.loads(Path(out).read_text())
    assert (result["policy"], result["all"]["cells"]) == ("fcfs@512", 7)
    assert (result["all"]["attained"], result["all"]["offline_of_bound"]) == (0.5, 1.0)
    assert set(result["loads"]) == set(LOADS)
    assert set(result["others"]) == set(POLICIES)
    lines = shown.splitlines()
    assert " ".join(shown.split()).startswith(
        "fcfs@512 keeps both targets for 50.0% of the chats, and does 2,000 offline tok/s. "
        f"Of {len(POLICIES)} other policies {len(POLICIES) - 1} have more chats in time; 1 have as many, 0 of these"
    )
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert any(line.split()[:5] == ["all", "50.0", "50.0", "2,000", "100.0"] for line in lines)


def test_rivals_come_from_the_kept_table(run_gym: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gym("table", "--quick", "--load", "burst", "--policies", "neaptide", "priority", "--run") == 0
    capsys.readouterr()
    ran: list[str] = []

    def counted(run: Run) -> Outcome:
        ran.append(run.policy)
        return by_hand(run)

    assert run_gym("run", "fcfs@512", "--quick", "--load", "burst", simulate=counted) == 0
    assert ran == ["fcfs@512"]
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["others"]) == {"neaptide", "priority"}
    assert run_gym("table", "--quick", "--load", "burst") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("neaptide", "priority"))] == [
        ["neaptide", "95.0"],
        ["priority", "80.0"],
    ]


def test_a_row_is_made_anew_where_the_table_lacks_it(
    run_gym: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("table", "--quick", "--load", "burst", "--run", "--policies")
    assert run_gym(*flags, "neaptide") == 0
    ran: list[str] = []

    def counted(run: Run) -> Outcome:
        ran.append(run.policy)
        return by_hand(run)

    assert run_gym(*flags, "neaptide", "priority", simulate=counted) == 0
    assert ran == ["priority"]
    written = (tmp_path / "page.md").read_text()
    assert "| `priority` | 1 | 80.0 |" in written
    assert "`fcfs`" not in written, "no row without a cell"
    assert [
        json.loads(line.rstrip(","))["policy"] for line in (tmp_path / "table.json").read_text().split("\n")[1:-2]
    ] == [
        BOUND,
        "neaptide",
        "priority",
    ]


def test_no_cell_is_begun_after_the_limit(run_gym: Callable[..., int], tmp_path: Path) -> None:
    assert run_gym("table", "--quick", "--run", "--limit-s", "0") == 0
    assert not (tmp_path / "table.json").exists()


def test_a_cell_that_fails_is_named_and_the_others_are_shown(
    run_gym: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def simulate(run: Run) -> Outcome:
        return Failed("ZeroDivisionError") if run.cell.case == "burst" and run.policy == "fcfs" else by_hand(run)

    assert run_gym("run", "fcfs", "--quick", simulate=simulate) == 1
    captured = capsys.readouterr()
    assert "neaptide gym: gym burst quick | fcfs: ZeroDivisionError" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["all"]["cells"] == 6


def test_a_card_needs_one_cell_at_least(run_gym: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_gym("run", "fcfs", "--quick", simulate=lambda run: Failed("stuck")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("neaptide gym: no cell has figures, so there is no card\n")


def test_cells_that_fail_for_one_reason_are_one_line(
    run_gym: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def simulate(run: Run) -> Outcome:
        return Failed("stuck") if run.policy == "fcfs" else by_hand(run)

    assert run_gym("run", "fcfs", "--quick", simulate=simulate) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "stuck" in line and "FAILED" not in line]
    assert said == ["neaptide gym: gym chats quick and 6 others | fcfs: stuck"]


def test_a_policy_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from neaptide.policy import Draft, Scheduler\n\n\nclass Own(Scheduler):\n"
        "    def pack(self, draft: Draft) -> float:\n        raise ValueError('no idea')\n"
    )
    outcome = in_a_process(Run(cell(), "own:Own", Tree(ROOT)), folder=tmp_path)
    assert outcome == Failed("ValueError: no idea (own.py, line 6)")


def test_a_policy_that_starves_offline_work_is_told(
    run_gym: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def simulate(run: Run) -> Outcome:
        one = by_hand(run)
        return msgspec.structs.replace(one, offline_tokens_per_s=2.0) if run.cell.case == "burst" else one

    assert run_gym("run", "fcfs", "--quick", simulate=simulate) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "It starves offline work, with under 1% of what is possible: burst." in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("run", "nowhere.py"), "nowhere.py: no such file"),
        (("run", "fcfs", "--json", "/nowhere/out.json"), "no such directory"),
        (("run", "fcfs", "--jobs", "0"), "--jobs must be at least 1"),
        (("table", "--policies", "mine"), "the table has no row 'mine'"),
    ],
)
def test_bad_input_is_one_clear_line(
    flags: tuple[str, ...], message: str, run_gym: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_gym(*flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("neaptide gym: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_the_loads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gym("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:7]] == list(LOADS)


def test_a_policy_of_a_file_outside_the_tree_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of the page, copied elsewhere, in real processes on a small cell."""
    small = cell("gym small", case="burst", offline="fixed-32-4")
    monkeypatch.setattr(command, "cells", lambda quick=False: [small])
    monkeypatch.setattr(command, "GymTable", lambda: GymTable(tmp_path / "table.json"))
    example = Path(__file__).parents[3] / "examples" / "own_policy.py"
    path = tmp_path / "my_policy.py"
    path.write_text(example.read_text())
    assert gym("run", str(path), "--quick", "--cache", str(tmp_path / "cache")) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["all"]["cells"] == 1
    assert result["all"]["offline_tokens_per_s"] > 0.0
    assert 0.0 < result["all"]["offline_of_bound"] <= 1.0
    assert result["all"]["planning_mean_ms"] > 0.0


def test_a_module_of_the_folder_hides_no_library(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise RuntimeError\n")
    assert isinstance(in_a_process(Run(cell(), "fcfs", Tree(ROOT)), folder=tmp_path), Figures)


def test_the_page_is_made_of_the_kept_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(GymTable())


def test_the_kept_table_has_cells_of_the_gym_alone() -> None:
    names = {each.name for quick in (True, False) for each in cells(quick=quick)}
    kept = json.loads(tables.PATH.read_text(encoding="utf-8"))
    assert {one["cell"] for one in kept} <= names
    assert {one["policy"] for one in kept} <= {BOUND, *POLICIES}

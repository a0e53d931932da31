"""The acceptance table: rows name their commit, and a run of some rows leaves the others as they were."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.acceptance import ROWS, AcceptanceTable, commit_of, known_rows


def write_table(out: Path, names: set[str], tried: str, *, passed: bool = True) -> None:
    table = AcceptanceTable(out, names)
    report: Any = SimpleNamespace(passed=passed, failed=not passed)
    for name in names:
        table._count(pytest.mark.acceptance(name, tried, count=1200).mark, report)
    table.pytest_sessionfinish()


def test_a_row_says_what_was_real_and_what_was_simulated_and_names_its_commit(tmp_path: Path) -> None:
    out = tmp_path / "acceptance.md"
    write_table(out, set(ROWS), "a fault")
    (line,) = [line for line in out.read_text().splitlines() if line.startswith("| A5 ")]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:6] == [ROWS["A5"].name, "a fault (1,200)", ROWS["A5"].real, ROWS["A5"].simulated]
    assert cells[6] == "1 of 1"
    assert re.fullmatch(r"[0-9a-f]{10}\+?", cells[7])
    assert cells[8] == "holds"


def test_rows_that_were_not_run_keep_what_was_tried_and_their_commit(tmp_path: Path) -> None:
    out = tmp_path / "acceptance.md"
    write_table(out, set(ROWS), "before")
    out.write_text(re.sub(r"[0-9a-f]{10}\+?", "0123456789", out.read_text()))
    write_table(out, {"A5"}, "now", passed=False)
    rows = known_rows(out)
    assert rows.keys() == ROWS.keys()
    assert rows["A4"] == ("before (1,200)", "1 of 1", "0123456789", "holds")
    assert (rows["A5"][0], rows["A5"][1], rows["A5"][3]) == ("-", "0 of 1", "**fails**")
    assert rows["A5"][2] != "0123456789"


def test_every_row_says_what_it_ran_on() -> None:
    assert all(fault.real and fault.simulated and fault.name for name, fault in ROWS.items())


def test_a_tree_with_changes_is_marked(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        names = ["-c", "user.name=n", "-c", "user.email=e@example.invalid", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *names, *arguments], check=True, capture_output=True)

    table = tmp_path / "acceptance.md"
    git("init")
    table.write_text("")
    git("add", "-A")
    git("commit", "-m", "one")
    clean = commit_of(table, tmp_path)
    assert re.fullmatch(r"[0-9a-f]{10}", clean)
    table.write_text("a table that is written anew is no change")
    assert commit_of(table, tmp_path) == clean
    (tmp_path / "code.py").write_text("")
    assert commit_of(table, tmp_path) == f"{clean}+"

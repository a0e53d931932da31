"""The acceptance table: rows name their commit, and a run of some rows leaves the others as they were."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.acceptance import PROPERTY, ROWS, AcceptanceTable, commit_of, known_rows

PROJECT = Path(__file__).parents[1]


def write_table(out: Path, names: set[str], tried: str, *, passed: bool = True) -> None:
    table = AcceptanceTable(out, names)
    for name in names:
        shown = [(PROPERTY, [name, tried, 1200])]
        report: Any = SimpleNamespace(when="call", passed=passed, failed=not passed, user_properties=shown)
        table.pytest_runtest_logreport(report)
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


def test_workers_say_what_their_tests_show(tmp_path: Path) -> None:
    """A run of three tests in a worker: one shows A6, one shows nothing, and one of another row fails."""
    tests = tmp_path / "test_rows.py"
    tests.write_text(
        "import pytest\n"
        "@pytest.mark.acceptance('A6', 'a fault', count=3)\ndef test_one(): pass\n"
        "def test_of_no_row(): assert False\n"
        "@pytest.mark.acceptance('A4', 'another')\ndef test_two(): assert False\n"
    )
    out = tmp_path / "acceptance.md"
    write_table(out, set(ROWS), "before")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = acceptance: a row\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "tests.acceptance", f"--acceptance-out={out}"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        [*command, "-p", "xdist", "--acceptance-rows=A4,A6", str(tests)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = known_rows(out)
    assert (rows["A6"][:2], rows["A4"][1]) == (("a fault (3)", "1 of 1"), "0 of 1"), run.stdout + run.stderr
    assert rows["A5"][0] == "before (1,200)"


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

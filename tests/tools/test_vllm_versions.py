"""The table of versions in the page of the vllm executor."""

from pathlib import Path

import pytest

from tools import vllm_versions
from tools.vllm_versions import BEGIN, END, NOT_TRIED, Counts, Row, State, cell, compared, files_inside, tried, write


def row(version: str, v1: str = "3 passed", v2: str = NOT_TRIED) -> Row:
    return Row(version, "the same", v1, v2, "2026-11-22")


def test_rows_of_other_versions_stay_and_the_newest_stands_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nbehind\n")
    monkeypatch.setattr(vllm_versions, "PAGE", page)
    write([row("0.9.2"), row("0.10.0", "1 passed")])
    write([row("0.10.0"), row("0.9.10")])
    before, table = page.read_text().split(BEGIN)
    table, behind = table.split(END)
    assert (before, behind) == ("before\n", "\nbehind\n")
    assert table.splitlines()[3:] == [str(row("0.10.0")), str(row("0.9.10")), str(row("0.9.2"))]


@pytest.mark.parametrize(
    ("v1", "v2", "has_passed"),
    [
        ("3 passed", NOT_TRIED, True),
        ("3 passed", "2 passed, 1 skipped", True),
        ("3 passed, 1 failed", NOT_TRIED, False),
        ("3 passed", "does not start: KeyError", False),
        ("cannot be installed", NOT_TRIED, False),
        ("3 passed", "2 passed in 1 of 2 files (greedy)", False),
    ],
)
def test_a_version_has_passed_if_no_test_failed(v1: str, v2: str, has_passed: bool) -> None:
    assert row("0.32.0", v1, v2).has_passed is has_passed


def test_new_fields_are_counted_and_new_arguments_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    lines = ("m:A.x is new", "m:A.y is new", "engine_arguments: sched is new", "m:A.z is gone")
    text = "\n".join((f"vLLM 0.33.0 against the contract of 0.32.0: {len(lines)} differences", *lines))
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    python.chmod(0o755)
    named = "`engine_arguments: sched is new`; `m:A.z is gone`"
    assert compared(python) == ("0.33.0", f"new fields: 2; {named}")


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({}, NOT_TRIED),
        ({"test_a.py": {"passed": 3}, "b/test_b.py": {"passed": 2, "skipped": 1}}, "5 passed, 1 skipped"),
        ({"test_a.py": {"passed": 3}, "b/test_b.py": {"skipped": 1}}, "3 passed, 1 skipped"),
        ({"b/test_b.py": {"passed": 2, "failed": 1}}, "2 passed, 1 failed in 1 of 2 files (b)"),
        ({"test_a.py": {"passed": 3}, "test_gone.py": {"passed": 9}}, "3 passed in 1 of 2 files (a)"),
        ({"test_a.py": "does not start: no", "b/test_b.py": {"passed": 2}}, "test_a.py: does not start: no"),
    ],
)
def test_a_cell_says_how_many_and_of_what(outcomes: dict[str, Counts | str], said: str) -> None:
    assert cell(outcomes, ["test_a.py", "b/test_b.py"]) == said


def test_a_run_goes_on_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has passed is not run again, by another process either; what has failed is."""
    files = ["test_a.py", "test_b.py", "test_c.py"]
    run: list[tuple[str, bool]] = []
    answers: dict[str, Counts | str] = {
        "test_a.py": {"passed": 1},
        "test_b.py": {"failed": 1},
        "test_c.py": {"passed": 4},
    }

    def outcome(python: Path, file: str, environment: dict[str, str]) -> Counts | str:
        run.append((file, bool(environment)))
        return answers[file]

    monkeypatch.setattr(vllm_versions, "outcome", outcome)
    monkeypatch.setattr(vllm_versions, "compared", lambda python: ("0.33.0", "the same"))
    monkeypatch.setattr(vllm_versions, "files_inside", lambda: files)
    path, python = tmp_path / "state.json", tmp_path / "python"
    first = tried(python, str(python), ["V2"], State(path), files[:2])
    assert first[:4] == ("0.33.0", "the same", NOT_TRIED, "1 passed, 1 failed in 2 of 3 files (a, b)")
    answers["test_b.py"] = {"passed": 2, "skipped": 1}
    second = tried(python, str(python), ["V2"], State(path), files)
    assert second[2:4] == (NOT_TRIED, "7 passed, 1 skipped")
    assert tried(python, str(python), ["V1"], State(None), files[:1]).v1 == "1 passed in 1 of 3 files (a)"
    assert run == [(file, True) for file in (*files[:2], *files[1:])] + [("test_a.py", False)]


def test_what_a_file_has_come_to_is_read_from_its_last_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '== 1 failed, 12 passed, 3 skipped in 4.20s =='\n")
    python.chmod(0o755)
    assert vllm_versions.outcome(python, "test_a.py", {}) == {"failed": 1, "passed": 12, "skipped": 3}
    python.write_text("#!/bin/sh\necho 'No module named pytest' >&2\n")
    assert vllm_versions.outcome(python, "test_a.py", {}) == "does not start: No module named pytest"


def test_every_file_inside_is_one_of_the_suite() -> None:
    assert {"test_greedy.py", "sampling/test_draws.py", "quantised/test_quantised.py"} <= set(files_inside())

"""The table of versions in the page of the vllm executor."""

from pathlib import Path

import pytest

from tools import vllm_versions
from tools.vllm_versions import BEGIN, END, NOT_TRIED, Row, compared, write


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

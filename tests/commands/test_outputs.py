"""Where the JSON line of a result goes."""

import sys
from pathlib import Path

import pytest

from neaptide.commands.outputs import STDOUT, check_writable, print_json, write_json


@pytest.mark.parametrize(
    ("is_terminal", "path", "printed"),
    [(False, None, True), (True, None, False), (True, STDOUT, True), (True, Path("out.json"), False)],
)
def test_a_terminal_shows_the_line_only_if_it_is_asked_for(
    is_terminal: bool,
    path: Path | None,
    printed: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    print_json("{}", path)
    assert capsys.readouterr().out == ("{}\n" if printed else "")


def test_a_dash_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_writable(STDOUT)
    write_json("{}", STDOUT)
    assert list(tmp_path.iterdir()) == []


def test_the_line_is_written_to_a_file(tmp_path: Path) -> None:
    write_json("{}", tmp_path / "out.json")
    assert (tmp_path / "out.json").read_text() == "{}\n"

"""Commands and orders that other packages bring."""

import re
from pathlib import Path

import pytest

from neaptide.cli import main
from tests.commands.test_offline_plan import PREFIX, batch, planned
from tests.engine.test_extensions import installed

REPOSITORY = Path(__file__).parents[2]
COMMAND = """
def add_parser(subparsers):
    subparsers.add_parser("greet", help="say hello").set_defaults(func=lambda args: print("hello") or 0)
"""


def test_a_command_goes_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(tmp_path, "greeting", COMMAND, "[neaptide.commands]\ngreet = greeting:add_parser\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["greet"]) == 0
    assert capsys.readouterr().out == "hello\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "say hello" in capsys.readouterr().out


def test_one_that_cannot_be_loaded_is_told_in_a_line_and_takes_no_other_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(tmp_path, "sulking", "1 / 0\n", "[neaptide.commands]\nsulk = sulking:add_parser\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["sulk"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("neaptide: the command 'sulk' cannot be loaded: ZeroDivisionError: division by zero")
    assert said.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "simulate" in capsys.readouterr().out


def test_the_order_of_the_page_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "write-a-policy.md").read_text()
    (text,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pool: PromptPool" in block)
    (tmp_path / "own_order.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    path = batch(tmp_path / "in.jsonl", [f"{PREFIX}{number}" for number in range(4)])
    found = planned(capsys, path, "--policy", "own_order:longest_answer_first", "--order", tmp_path / "out.txt")
    assert found["policy"] == "own_order:longest_answer_first"
    assert (tmp_path / "out.txt").read_text().split() == [f"line-{number}" for number in range(4)]

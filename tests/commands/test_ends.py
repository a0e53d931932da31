"""How a command ends that its user stops, or whose reader leaves."""

import os

import pytest

from neaptide import cli


def test_a_reader_that_leaves_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert cli.main(["experiment", "list"]) == cli.UNHEARD
    assert capsys.readouterr().err == ""


def test_ctrl_c_while_the_command_line_is_read_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(only: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", interrupted)
    assert cli.main(["serve"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "stopped\n"

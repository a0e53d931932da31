"""How a command ends that its user stops."""

import pytest

from neaptide import cli


def test_ctrl_c_while_the_command_line_is_read_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(only: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", interrupted)
    assert cli.main(["serve"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "stopped\n"

"""The help of the commands names what a flag takes."""

import pytest

from neaptide.cli import build_parser
from neaptide.estimator.device_profile import profile_names


@pytest.mark.parametrize("command", ["serve", "simulate", "plan", "offline-plan"])
def test_the_help_names_every_built_in_profile(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser(command).parse_args([command, "--help"])
    shown = "".join(capsys.readouterr().out.split())  # lines break at hyphens too
    assert [name for name in profile_names() if name not in shown] == []

"""How a command ends that its user stops."""

import subprocess
import sys

import pytest

from neaptide import cli
from neaptide.__main__ import INTERRUPTED, main

INTERRUPTED_IMPORT = """
import runpy, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "neaptide.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
runpy.run_module("neaptide", run_name="__main__")
"""


def test_ctrl_c_while_the_command_line_is_read_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(only: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", interrupted)
    assert main(["serve"]) == INTERRUPTED
    assert capsys.readouterr().err == "stopped\n"


def test_ctrl_c_while_the_command_imports_is_one_word() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "stopped\n")

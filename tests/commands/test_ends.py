"""How a command ends that its user stops, or that cannot begin."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from neaptide import cli
from neaptide.__main__ import INTERRUPTED, main
from neaptide.launch.serve import listen

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


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Runs a command that cannot begin, and gives its status and its one line."""
    for place in ("neaptide.launch.serve", "neaptide.cluster.launch.machine", "neaptide.cluster.launch.fronting"):
        monkeypatch.setattr(f"{place}.configure_logging", lambda *_: None)

    def run(*words: str) -> str:
        port = () if "--port" in words else ("--port", "0")
        status = cli.main([*words, *port, "--data-dir", str(tmp_path / "data")])
        (line,) = capsys.readouterr().err.splitlines()
        return f"{status} {line}"

    return run


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--profile", "h1000"], "no profile 'h1000'"),
        (["--step-log", "/no/such/folder/log"], "step_log = '/no/such/folder/log' cannot be written"),
        (["--policy", "mine"], "there is no policy 'mine'"),
        (["--executor", "trch"], "executor = 'trch' is not supported"),
        (["--executor-arg", "fp8"], "executor_arg = 'fp8' is not of the form NAME=VALUE"),
        (["--api-key", "night:bacth"], "API key 1 of 1 has a colon that is not followed by a mark"),
        (["--api-key-file", "/no/keys.toml"], "the key file /no/keys.toml cannot be read"),
        (["--tool-call-parser", "qwen9"], "there is no tool call parser 'qwen9'"),
        (["--engine-python", "/no/python"], "engine_python = '/no/python'"),
        (["--completion-windows", "1y"], "completion_windows: '1y' is not a length of time"),
        (["--store", "oracle://h/d"], "there is no store for oracle://"),
        (["--ttft-slo-ms", "-1"], "ttft_slo_ms = "),
        (["/no/such/model"], "/no/such/model: no such directory"),
    ],
)
def test_a_wrong_value_is_2(says: Callable[..., str], words: list[str], line: str, tmp_path: Path) -> None:
    assert says("serve", *words).startswith(f"2 neaptide serve: {line}")
    assert not (tmp_path / "data").exists()


def test_a_cluster_without_a_database_is_2(says: Callable[..., str]) -> None:
    assert says("cluster").startswith("2 neaptide cluster: replicas share their batches in a database: set --store")


def test_a_model_that_cannot_be_downloaded_is_1(says: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert says("serve", "an-org/a-model").startswith("1 neaptide serve: an-org/a-model: neither a local directory nor")


def test_a_port_in_use_and_a_directory_of_another_program_are_1(says: Callable[..., str], tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert says("serve", "--port", str(port)).startswith(f"1 neaptide serve: cannot listen on 127.0.0.1:{port}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "letter.txt").write_text("hello")
    assert says("serve").startswith(f"1 neaptide serve: {tmp_path}/data is not a neaptide data directory")

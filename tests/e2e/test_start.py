"""What keeps a server from starting is said in one line."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from neaptide import cli
from tests.e2e.server import RunningServer

FailedStart = Callable[..., str]


def the_line(stderr: str) -> str:
    (line,) = [line for line in stderr.splitlines() if line.startswith("neaptide serve: ")]
    return line


@pytest.fixture
def failed_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> FailedStart:
    """The command in this process, which has loaded everything already; an engine has its own all the same."""
    monkeypatch.setattr("neaptide.launch.serve.configure_logging", lambda level, form: None)

    def start(*flags: str, status: int) -> str:
        assert cli.main(["serve", *flags]) == status
        return the_line(capsys.readouterr().err)

    return start


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Qwen2_5_VLForConditionalGeneration"])
def test_unknown_architecture(architecture: str, failed_start: FailedStart, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": {}}))
    assert failed_start(str(tmp_path), "--data-dir", str(tmp_path / "data"), status=2) == (
        f"neaptide serve: architecture {architecture} is not supported by our own executor (docs/models.md lists what "
        "is); --executor vllm serves more models"
    )


def test_policy_that_does_not_exist(failed_start: FailedStart) -> None:
    line = failed_start("--policy", "best", status=2)
    assert "there is no policy 'best'; there are: " in line
    assert "neaptide" in line.partition("there are: ")[2]


def test_executor_that_does_not_exist(failed_start: FailedStart) -> None:
    line = failed_start("--executor", "best", status=2)
    assert line.endswith("executor = 'best' is not supported; there are: sim, torch, vllm")


@pytest.mark.parametrize(
    ("executor", "profile", "reason"),
    [
        ("sim", "nonsense", "no profile 'nonsense'"),
        pytest.param("torch", "h100-80g-llama-3.1-8b", "not the same model", marks=pytest.mark.full),
    ],
)
def test_profile_that_cannot_be_used(
    failed_start: FailedStart, executor: str, profile: str, reason: str, tmp_path: Path
) -> None:
    flags = ("--executor", executor, "--profile", profile)
    assert reason in failed_start(*flags, "--port", "0", "--data-dir", str(tmp_path), status=2)


@pytest.mark.acceptance("A11", "port in use at start")
def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        command = [sys.executable, "-m", "neaptide", "serve", "--data-dir", str(tmp_path)]
        command += ["--port", str(s.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot listen" in the_line(done.stderr)


@pytest.mark.full
def test_kv_cache_smaller_than_one_request(failed_start: FailedStart, tmp_path: Path) -> None:
    assert "KV cache" in failed_start("--kv-cache-gib", "0.001", "--port", "0", "--data-dir", str(tmp_path), status=2)


@pytest.mark.acceptance("A11", "second server on one data directory")
def test_second_server_on_one_data_directory(
    failed_start: FailedStart, embedded: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = str(embedded.data_dir)
    assert "uses the data directory" in failed_start("--port", "0", "--data-dir", data_dir, status=1)
    assert cli.main(["data", "sizes", "--data-dir", data_dir]) == 2
    assert f"another neaptide process ({embedded.process.pid})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["serve", "--no-such-thing"], "neaptide serve: unrecognized arguments: --no-such-thing; see neaptide serve -"),
        (
            ["serve", "m", "--gpu-memory-utilization", "0.9"],
            "neaptide serve: unrecognized arguments: --gpu-memory-utilization 0.9; --kv-cache-gib sets the memory of",
        ),
        (["serve", "--prot", "8001"], "neaptide serve: unrecognized arguments: --prot; did you mean --port? See "),
        (
            ["loadgen", "synth", "--rte=1"],
            "neaptide loadgen synth: unrecognized arguments: --rte=1; did you mean --rate?",
        ),
    ],
)
def test_flag_that_there_is_none_of(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(complaint)


def test_a_wrong_choice_is_one_line_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--device", "tpu"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("neaptide serve: argument --device: invalid choice: 'tpu' (choose from ")
    assert all(choice in line for choice in ("auto", "cpu", "cuda"))


def test_no_command_is_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: neaptide ")

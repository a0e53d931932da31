"""What keeps a server from starting is said in one line."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import RunningServer


def failed_start(*flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "neaptide", "serve", *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("neaptide serve: ")]
    return line


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    assert "GPT2LMHeadModel" in failed_start(str(tmp_path), "--data-dir", str(tmp_path / "data"))


def test_policy_that_does_not_exist() -> None:
    line = failed_start("--policy", "best")
    assert "policy = 'best' is not supported; there are: " in line
    assert "neaptide" in line.partition("there are: ")[2]


def test_executor_that_does_not_exist() -> None:
    assert failed_start("--executor", "best").endswith(
        "executor = 'best' is not supported; there are: sim, torch, vllm"
    )


@pytest.mark.parametrize(
    ("profile", "reason"),
    [("nonsense", "no profile 'nonsense'"), ("h100-80g-llama-3.1-8b", "not the same model")],
)
def test_profile_that_cannot_be_used(profile: str, reason: str, tmp_path: Path) -> None:
    assert reason in failed_start("--profile", profile, "--port", "0", "--data-dir", str(tmp_path))


@pytest.mark.acceptance("A11", "port in use at start")
def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        assert "cannot listen" in failed_start("--port", str(s.getsockname()[1]), "--data-dir", str(tmp_path))


def test_kv_cache_smaller_than_one_request(tmp_path: Path) -> None:
    assert "KV cache" in failed_start("--kv-cache-gib", "0.001", "--port", "0", "--data-dir", str(tmp_path))


@pytest.mark.acceptance("A11", "second server on one data directory")
def test_second_server_on_one_data_directory(tmp_path: Path) -> None:
    with RunningServer(tmp_path, env={"NEAPTIDE_EXECUTOR": "sim"}) as server:
        assert "uses the data directory" in failed_start("--port", "0", "--data-dir", str(server.data_dir))
        command = [sys.executable, "-m", "neaptide", "data", "sizes", "--data-dir", str(server.data_dir)]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert refused.returncode == 2
        assert f"another neaptide process ({server.process.pid})" in refused.stderr


def test_flag_that_is_not_supported_yet() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "neaptide", "serve", "--batch-invariant"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "unrecognized arguments" in done.stderr

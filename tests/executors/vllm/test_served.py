"""A real server whose engine runs on vLLM's interpreter."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from neaptide.launch.serve import embedded_model_path
from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal
from tests.executors.vllm.interpreter import PYTHON, needs_vllm

pytestmark = needs_vllm

FLAGS = ("--executor", "vllm", "--engine-python", str(PYTHON), "--executor-arg", "enforce_eager=true")
FLAGS += ("--dtype", "float32", "--block-size", "32", "--max-model-len", "512", "--kv-cache-gib", "0.1")
START_S = 300.0
"""vLLM takes its time on a busy machine."""


def ask(server: RunningServer) -> str:
    body = {"messages": [{"role": "user", "content": "What is 21 + 34?"}], "temperature": 0}
    reply = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return str(reply["choices"][0]["message"]["content"])


def test_chats_and_batches_are_answered_and_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    with RunningServer(tmp_path, *FLAGS, start_timeout_s=START_S) as server:
        assert ask(server).endswith("55")
        messages = [{"role": "user", "content": "What is 21 + 34?"}]
        line = {"model": "neaptide-tiny", "messages": messages, "temperature": 0}
        batch = wait_terminal(server, submit_batch(server, [line] * 20))
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert len(result_lines(server, batch)) == 20
        engine = server.engine
        assert engine.exe() == str(PYTHON.resolve())
        engine.kill()
        psutil.wait_procs([engine], timeout=10)
        server.wait_for(lambda: server.http.get("/ready").status_code == 503)
        server.wait_ready()
        assert ask(server).endswith("55")
        engine = server.engine
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert not engine.is_running()


@pytest.mark.full
@pytest.mark.parametrize("victim", ["engine", "server"])
def test_workers_die_with_the_engine_and_the_engine_with_the_server(tmp_path: Path, victim: str) -> None:
    ranks = ("--executor-arg", "tensor_parallel_size=2")
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with RunningServer(tmp_path, *FLAGS, *ranks, env=env, start_timeout_s=START_S) as server:
        assert ask(server).endswith("55")
        engine = server.engine
        family = engine.children(recursive=True)
        assert len(family) >= 2
        os.kill(server.process.pid if victim == "server" else engine.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs([engine, *family], timeout=10)
        assert not alive


def failed_start(model: Path, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "neaptide", "serve", str(model), *FLAGS, "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("neaptide serve: ")]
    return line.removeprefix("neaptide serve: ")


def copy_with(directory: Path, **changes: Any) -> Path:
    """The embedded model without its weights, and with another configuration."""
    model = directory / "model"
    shutil.copytree(embedded_model_path(), model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.full
def test_an_argument_that_vllm_does_not_know_is_told_in_one_line(tmp_path: Path) -> None:
    line = failed_start(embedded_model_path(), "--executor-arg", "no_such=1", "--data-dir", str(tmp_path / "data"))
    assert line == "vLLM does not start: executor_arg: unrecognized arguments: --no-such=1"


def test_a_model_without_attention_is_refused_in_one_line(tmp_path: Path) -> None:
    changes = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16, "num_hidden_layers": 2}
    line = failed_start(copy_with(tmp_path, **changes), "--data-dir", str(tmp_path / "data"))
    assert line.endswith("the vllm executor does not serve this model: it has layers without attention")


@pytest.mark.full
def test_weights_that_are_missing_are_told_in_one_line(tmp_path: Path) -> None:
    line = failed_start(copy_with(tmp_path), "--data-dir", str(tmp_path / "data"))
    assert line.startswith("vLLM does not start: ")

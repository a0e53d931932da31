"""A real server whose engine runs on vLLM's interpreter."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from neaptide.launch.serve import embedded_model_path
from tests.e2e.server import (
    RunningServer,
    durable_lines,
    get_batch,
    lines_run_again,
    result_lines,
    stream_events,
    submit_batch,
    wait_terminal,
)
from tests.executors.vllm.interpreter import PYTHON, needs_vllm
from tests.patience import PATIENCE_S

pytestmark = needs_vllm

FLAGS = ("--executor", "vllm", "--engine-python", str(PYTHON), "--executor-arg", "enforce_eager=true")
FLAGS += ("--dtype", "float32", "--block-size", "32", "--max-model-len", "512", "--kv-cache-gib", "0.1")


def ask(server: RunningServer) -> str:
    body = {"messages": [{"role": "user", "content": "What is 21 + 34?"}], "temperature": 0}
    reply = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return str(reply["choices"][0]["message"]["content"])


def assert_grammars_are_followed(server: RunningServer, messages: list[dict[str, str]]) -> None:
    """And checked by the compiler of the engine's interpreter."""

    def reply(schema: dict[str, Any]) -> Any:
        return server.http.post("/v1/chat/completions", json={"messages": messages, "guided_json": schema})

    enum = {"enum": [{"side": "left"}, {"side": "right"}]}
    assert json.loads(reply(enum).json()["choices"][0]["message"]["content"]) in enum["enum"]
    refused = reply({"type": "array", "uniqueItems": True})
    assert (refused.status_code, "'uniqueItems'" in refused.text) == (400, True)
    checkers = [p for p in psutil.Process(server.process.pid).children() if "structured.child" in " ".join(p.cmdline())]
    assert [checker.exe() for checker in checkers] == [str(PYTHON.resolve())]


def test_chats_and_batches_are_answered_and_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    with RunningServer(tmp_path, *FLAGS) as server:
        assert ask(server).endswith("55")
        messages = [{"role": "user", "content": "What is 21 + 34?"}]
        assert_grammars_are_followed(server, messages)
        body = {"model": "neaptide-tiny", "messages": messages, "temperature": 0}
        batch = wait_terminal(server, submit_batch(server, [body] * 20))
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert len(result_lines(server, batch)) == 20
        engine = server.engine
        assert engine.exe() == str(PYTHON.resolve())
        engine.kill()
        psutil.wait_procs([engine], timeout=PATIENCE_S)
        server.wait_for(lambda: server.http.get("/ready").status_code == 503)
        server.wait_ready()
        assert ask(server).endswith("55")
        engine = server.engine
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert not engine.is_running()


def asking(index: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is {index % 90} + {index % 7}?"}]
    return {"model": "neaptide-tiny", "messages": messages, "max_completion_tokens": 24, "ignore_eos": True}


def test_a_killed_engine_costs_a_batch_no_line_and_no_line_twice(tmp_path: Path) -> None:
    with RunningServer(tmp_path, *FLAGS, "--max-num-seqs", "8") as server:
        batch_id = submit_batch(server, [asking(i) for i in range(200)])
        server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] >= 40)
        server.engine.kill()
        server.wait_for(lambda: server.http.get("/ready").status_code == 503)
        server.wait_ready()
        finished = durable_lines(server.data_dir)
        executed = len(server.request_log())
        assert 40 <= len(finished) < 200
        batch = wait_terminal(server, batch_id)
        assert batch["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
        assert [result["custom_id"] for result in result_lines(server, batch)] == [f"c{i}" for i in range(200)]
        again = lines_run_again(server, batch_id, executed)
        assert again
        assert not again & finished


def test_a_stop_signal_lets_a_stream_end_and_keeps_the_batch(tmp_path: Path) -> None:
    with RunningServer(tmp_path, *FLAGS, "--max-num-seqs", "8") as server:
        batch_id = submit_batch(server, [asking(i) for i in range(100)])
        server.wait_for(lambda: get_batch(server, batch_id)["status"] == "in_progress")
        stream = stream_events(
            server, asking(1) | {"max_completion_tokens": 300, "stream_options": {"include_usage": True}}
        )
        next(stream)
        engine = server.engine
        for process in (engine, psutil.Process(server.process.pid)):
            process.send_signal(signal.SIGTERM)
        *_, last, usage, done = stream
        assert isinstance(last, dict)
        assert isinstance(usage, dict)
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 300
        assert done == "[DONE]"
        assert server.process.wait(PATIENCE_S) == 0
        assert not engine.is_running()
        server.start()
        batch = wait_terminal(server, batch_id)
        assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
        assert [result["custom_id"] for result in result_lines(server, batch)] == [f"c{i}" for i in range(100)]


def failed_start(model: Path, *flags: str, status: int = 1) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "neaptide", "serve", str(model), *FLAGS, "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status
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
    data_dir = ("--data-dir", str(tmp_path / "data"))
    line = failed_start(embedded_model_path(), "--executor-arg", "no_such=1", *data_dir, status=2)
    assert line == "vLLM does not start: executor_arg: unrecognized arguments: --no-such=1"


@pytest.mark.full
def test_a_value_that_vllm_does_not_take_is_told_in_one_line(tmp_path: Path) -> None:
    data_dir = ("--data-dir", str(tmp_path / "data"))
    line = failed_start(embedded_model_path(), "--executor-arg", "tensor_parallel_size=0", *data_dir, status=2)
    assert line.startswith("vLLM does not start: ")
    assert "greater than or equal to 1" in line


def test_a_model_without_attention_is_refused_in_one_line(tmp_path: Path) -> None:
    changes = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16, "num_hidden_layers": 2}
    line = failed_start(copy_with(tmp_path, **changes), "--data-dir", str(tmp_path / "data"), status=2)
    assert line.endswith("the vllm executor does not serve this model: it has layers without attention")


@pytest.mark.full
def test_weights_that_are_missing_are_told_in_one_line(tmp_path: Path) -> None:
    line = failed_start(copy_with(tmp_path), "--data-dir", str(tmp_path / "data"))
    assert line.startswith("vLLM does not start: ")

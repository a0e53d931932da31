import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_vs_peers import ALONE, OURS, TRANSFORMERS, VLLM, named, ratios, token_ids_of
from benchmarks.peers.installed import installed


def test_ratios_are_the_medians_of_turns_and_null_for_peers_that_were_not_there() -> None:
    rates = {
        "W1": {OURS: [10.0, 30.0, 20.0], VLLM: [10.0, 10.0, 40.0], TRANSFORMERS: [5.0, 10.0, 5.0]},
        ALONE: {OURS: [3.0], VLLM: [6.0]},
    }
    assert ratios(rates) == {
        "offline_vs_vllm_cpu": 1.0,
        "offline_vs_transformers": 3.0,
        "step_latency_vs_vllm_cpu": 0.5,
        "shared_prefix_vs_vllm_cpu": None,
        "offline_vs_llama_cpp": None,
        "offline_vs_openvino": None,
    }


def test_a_peer_has_a_name_and_a_command_that_takes_a_port() -> None:
    assert named("llama_cpp=llama-server --port {port}") == ("llama_cpp", "llama-server --port {port}")


@pytest.mark.parametrize("text", ["llama-server", "llama_cpp=llama-server", "a b=serve {port}"])
def test_what_names_no_server_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=COMMAND"):
        named(text)


def test_what_was_installed_is_started(tmp_path: Path) -> None:
    directory = tmp_path / "with a blank"
    files = ("openvino/bin/python", "openvino-111m/openvino_model.xml", "llama-server", "llama-cpp-111m-bf16.gguf")
    for path in files:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).touch()
    found = dict(named(f"{name}={command}") for name, command in installed(directory, 2, "bfloat16", 64, 2048))
    words = {name: [word.format(port=8123) for word in shlex.split(command)] for name, command in sorted(found.items())}
    assert list(words) == ["llama_cpp", "openvino"]
    assert words["openvino"][0] == str(directory / "openvino/bin/python")
    openvino = [str(directory / "openvino-111m"), "--port", "8123", "--threads", "2", "--dtype", "bf16"]
    assert words["openvino"][2:] == openvino
    llama_cpp = [str(directory / "llama-server"), "--model", str(directory / "llama-cpp-111m-bf16.gguf")]
    llama_cpp += ["--port", "8123", "--threads", "2", "--parallel", "64", "--ctx-size", "131072", "--cache-ram", "0"]
    assert words["llama_cpp"] == [*llama_cpp, "--offline", "--cache-type-k", "f16", "--cache-type-v", "f16"]


def test_only_what_was_installed_for_the_dtype_is_started(tmp_path: Path) -> None:
    for path in ("llama-server", "llama-cpp-111m-f32.gguf"):
        (tmp_path / path).touch()
    assert [name for name, _ in installed(tmp_path, 1, "float32", 4, 512)] == ["llama_cpp"]
    with pytest.raises(SystemExit, match="has no engine"):
        installed(tmp_path, 1, "bfloat16", 4, 512)


@pytest.mark.parametrize(
    ("choice", "token_ids"),
    [
        ({"text": " a", "token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0, -2.0]}}, [7, 8]),
        ({"text": " a", "logprobs": {"content": [{"id": 7, "logprob": -1.0}, {"id": 8, "logprob": -2.0}]}}, [7, 8]),
        ({"text": " a", "logprobs": {"token_logprobs": [-1.0]}}, None),
        ({"text": " a", "logprobs": None}, None),
    ],
)
def test_tokens_of_a_reply(choice: dict[str, Any], token_ids: list[int] | None) -> None:
    assert token_ids_of(choice) == token_ids


def test_a_directory_without_peers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no engine"):
        installed(tmp_path, 2, "bfloat16", 64, 2048)

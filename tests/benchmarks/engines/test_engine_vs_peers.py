import argparse
import shlex
from pathlib import Path

import pytest

from benchmarks.engine_vs_peers import ALONE, OURS, TRANSFORMERS, VLLM, named, ratios
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
    for path in ("openvino/bin/python", "openvino-111m/openvino_model.xml"):
        (directory / path).parent.mkdir(parents=True)
        (directory / path).touch()
    [(name, command)] = installed(directory, 2, "bfloat16")
    words = [word.format(port=8123) for word in shlex.split(command)]
    assert named(f"{name}={command}") == ("openvino", command)
    assert words[0] == str(directory / "openvino/bin/python")
    assert words[2:] == [str(directory / "openvino-111m"), "--port", "8123", "--threads", "2", "--dtype", "bf16"]


def test_a_directory_without_peers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no peer"):
        installed(tmp_path, 2, "bfloat16")

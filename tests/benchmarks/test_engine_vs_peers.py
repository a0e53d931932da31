import argparse

import pytest

from benchmarks.engine_vs_peers import ALONE, OURS, TRANSFORMERS, VLLM, named, ratios


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

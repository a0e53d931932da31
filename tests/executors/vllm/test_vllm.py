"""The vllm executor, tested in vLLM's own interpreter: one process for each model and runner."""

from pathlib import Path

import pytest

from tests.executors.vllm.interpreter import PYTHON, needs_vllm
from tests.inside import run_inside

INSIDE = Path(__file__).parent / "inside"

pytestmark = needs_vllm
full = pytest.mark.full
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
SHORT = {"NEAPTIDE_TEST_BLAST_STEPS": "60", "NEAPTIDE_TEST_DISCONNECTS": "60"}
"""For kernels that are interpreted."""
TWO_RANKS = {"NEAPTIDE_TEST_RANKS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
OTHERS = ("qwen3", "qwen3-moe", "opt")
WITH_WINDOWS = ("mistral", "gemma3", "gemma4")
"""On all layers, on some, on some of another shape than the rest."""
QUANTISED = ("w8a8", "w4a16", "gptq", "awq")
SAMPLING = ("sampling/test_sampling.py", "sampling/test_draws.py", "sampling/test_grammars.py")
STARTS = ("start/test_warm_up.py", "start/test_contract.py")
FIRST = (*STARTS, "test_translate.py")
FILES = ("test_greedy.py", *SAMPLING, "sampling/test_prompt_scores.py", "test_faults.py", "test_blast.py")
LOGPROBS = (
    "sampling/test_sampling.py::test_logprobs_are_raw_and_as_many_as_asked",
    "sampling/test_sampling.py::test_prompt_logprobs",
)


def run(*tests: str, **environment: str) -> None:
    run_inside(str(PYTHON), INSIDE, *tests, environment={"HF_HUB_OFFLINE": "1"} | environment, stop_early=True)


def test_llama() -> None:
    run(*FIRST, *FILES, "test_host_cache.py", "test_same_as_llm.py")


@full
def test_asynchronous_scheduling_by_force() -> None:
    run(*FILES, "test_host_cache.py", NEAPTIDE_TEST_ASYNC="1")


@full
@pytest.mark.parametrize("environment", [{}, V2], ids=["V1", "V2"])
def test_as_many_biases_as_a_request_may_have(environment: dict[str, str]) -> None:
    run("sampling/test_many_biases.py", **environment, NEAPTIDE_TEST_VOCAB="2048")


@full
@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family: str) -> None:
    files = ("test_greedy.py", "sampling/test_sampling.py", "test_host_cache.py", "test_same_as_llm.py")
    run(*files, NEAPTIDE_TEST_FAMILY=family)


@full
@pytest.mark.parametrize("family", WITH_WINDOWS)
def test_layers_with_a_window(family: str) -> None:
    run("test_greedy.py", "test_host_cache.py", "test_same_as_llm.py", NEAPTIDE_TEST_FAMILY=family)


@full
@pytest.mark.parametrize("weights", QUANTISED)
def test_quantised_weights(weights: str) -> None:
    run("quantised/test_quantised.py", "test_same_as_llm.py", NEAPTIDE_TEST_WEIGHTS=weights)


@full
def test_models_that_are_refused() -> None:
    run("test_refused.py")


@full
@pytest.mark.timeout(7200)
def test_blast_of_20000_steps_and_2000_clients_that_leave() -> None:
    run("test_blast.py", NEAPTIDE_TEST_BLAST_STEPS="20000", NEAPTIDE_TEST_DISCONNECTS="2000")


@full
@pytest.mark.timeout(3600)
def test_the_second_runner() -> None:
    run(*STARTS, *FILES, "test_host_cache.py", "test_same_as_llm.py", **V2, **SHORT)


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_on_the_second_runner(family: str) -> None:
    run("test_greedy.py", *LOGPROBS, **V2, NEAPTIDE_TEST_FAMILY=family)


@full
@pytest.mark.timeout(3600)
def test_two_ranks() -> None:
    files = ("test_greedy.py", *SAMPLING, "test_same_as_llm.py", "test_host_cache.py")
    scores = "sampling/test_prompt_scores.py::test_a_prompt_that_is_preempted"
    run(*STARTS, *files, scores, "test_faults.py", "test_blast.py", **TWO_RANKS)


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_on_two_ranks(family: str) -> None:
    run("test_greedy.py", "test_same_as_llm.py", *LOGPROBS, **TWO_RANKS, NEAPTIDE_TEST_FAMILY=family)


@full
@pytest.mark.timeout(3600)
def test_two_ranks_on_the_second_runner() -> None:
    run("test_greedy.py", "test_same_as_llm.py", *LOGPROBS, **TWO_RANKS, **V2)


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_on_two_ranks_on_the_second_runner(family: str) -> None:
    run("test_greedy.py", "test_same_as_llm.py", *LOGPROBS, **TWO_RANKS, **V2, NEAPTIDE_TEST_FAMILY=family)

"""The vllm executor, tested in vLLM's own interpreter: one process for each model and runner."""

import os
from pathlib import Path

import pytest

from tests.executors.vllm.interpreter import PYTHON, REPOSITORY, needs_vllm
from tests.inside import run_inside

INSIDE = Path(__file__).parent / "inside"

pytestmark = needs_vllm
full = pytest.mark.full
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
SHORT = {"NEAPTIDE_TEST_BLAST_STEPS": "60", "NEAPTIDE_TEST_DISCONNECTS": "60"}
"""For kernels that are interpreted."""
TWO_RANKS = {"NEAPTIDE_TEST_RANKS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
V2_IN_WORKERS = {
    "PYTHONPATH": os.pathsep.join([str(INSIDE / "second_runner"), str(REPOSITORY)]),
    "VLLM_COMPUTE_NANS_IN_LOGITS": "0",
}
FAMILIES = ("llama", "qwen3", "qwen3-moe", "opt")
every_family = pytest.mark.parametrize("family", FAMILIES)


def run(*tests: str, **environment: str) -> None:
    run_inside(str(PYTHON), INSIDE, *tests, environment={"HF_HUB_OFFLINE": "1"} | environment, stop_early=True)


def test_llama() -> None:
    files = ("test_greedy.py", "test_sampling.py", "test_faults.py", "test_grammars.py", "test_blast.py")
    run("test_warm_up.py", *files, "test_host_cache.py", "test_same_as_llm.py")


@full
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families(family: str) -> None:
    files = ("test_greedy.py", "test_sampling.py", "test_host_cache.py", "test_same_as_llm.py")
    run(*files, NEAPTIDE_TEST_FAMILY=family)


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
    files = ("test_greedy.py", "test_sampling.py", "test_faults.py", "test_blast.py", "test_grammars.py")
    run(*files, "test_host_cache.py", "test_same_as_llm.py", **V2, **SHORT)


@full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families_on_the_second_runner(family: str) -> None:
    run("test_greedy.py", "test_sampling.py", "test_same_as_llm.py", **V2, NEAPTIDE_TEST_FAMILY=family)


@full
@every_family
def test_two_ranks(family: str) -> None:
    files = ("test_greedy.py", "test_sampling.py", "test_same_as_llm.py", "test_grammars.py", "test_host_cache.py")
    run(*files, **TWO_RANKS, NEAPTIDE_TEST_FAMILY=family)


@full
@pytest.mark.timeout(3600)
@every_family
def test_two_ranks_on_the_second_runner(family: str) -> None:
    files = ("test_greedy.py", "test_sampling.py", "test_same_as_llm.py")
    run(*files, **V2, **TWO_RANKS, **V2_IN_WORKERS, NEAPTIDE_TEST_FAMILY=family)

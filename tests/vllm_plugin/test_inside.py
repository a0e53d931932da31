"""The scheduler inside vLLM, tested in vLLM's own interpreter."""

from pathlib import Path

import pytest

from tests.executors.vllm.interpreter import PYTHON, REPOSITORY, needs_vllm
from tests.inside import run_inside

INSIDE = Path(__file__).parent / "inside"
PYTHONPATH = ":".join(str(REPOSITORY / folder) for folder in ("", "lab", "vllm-plugin"))

pytestmark = needs_vllm


def run(*tests: str, **environment: str) -> None:
    run_inside(str(PYTHON), INSIDE, *tests, environment={"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"} | environment)


def test_scheduler() -> None:
    run("test_scheduler.py", "test_fuzz.py", "test_stat_logger.py")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_texts_are_those_of_plain_vllm() -> None:
    run("test_greedy.py")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_an_adapter() -> None:
    run("test_lora.py")


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_fuzz_of_100000_steps() -> None:
    run("test_fuzz.py", NEAPTIDE_TEST_FUZZ_STEPS="100000")

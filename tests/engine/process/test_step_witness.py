"""What a dead engine was running."""

import os
from collections.abc import Iterator

import pytest

from neaptide.engine.process.witness import StepWitness, create_witness, read_witness
from neaptide.engine.process.witness_observer import WitnessObserver
from tests.engine.harness import Harness, online


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_witness()
    yield fd
    os.close(fd)


def test_requests_of_the_running_step_are_read_back(fd: int) -> None:
    witness = StepWitness(fd)
    assert read_witness(fd) == []
    witness(["chat-0", "batch_1:7"])
    assert read_witness(fd) == ["chat-0", "batch_1:7"]
    witness(["b"])
    assert read_witness(fd) == ["b"]


def test_nothing_runs_between_steps(fd: int) -> None:
    witness = StepWitness(fd)
    witness(["a"])
    witness([])
    assert read_witness(fd) == []


def test_the_engine_notes_every_step_and_its_end() -> None:
    noted: list[list[str]] = []
    harness = Harness()
    harness.core.subscribe(WitnessObserver(lambda ids: noted.append(list(ids))))  # type: ignore[arg-type]
    harness.core.handle(online("a", [7, 8, 9], max_tokens=2))
    harness.run()
    assert noted == [["a"], [], ["a"], []]

"""What a dead engine was running."""

from pathlib import Path

from neaptide.engine.step_witness import StepWitness, read_witness
from tests.engine.harness import Harness, online


def test_requests_of_the_running_step_are_read_back(tmp_path: Path) -> None:
    witness = StepWitness(str(tmp_path / "w"))
    assert read_witness(tmp_path / "w") == []
    witness(["chat-0", "batch_1:7"])
    assert read_witness(tmp_path / "w") == ["chat-0", "batch_1:7"]
    witness(["b"])
    assert read_witness(tmp_path / "w") == ["b"]


def test_nothing_runs_between_steps(tmp_path: Path) -> None:
    witness = StepWitness(str(tmp_path / "w"))
    witness(["a"])
    witness([])
    assert read_witness(tmp_path / "w") == []


def test_no_engine_has_been_there(tmp_path: Path) -> None:
    assert read_witness(tmp_path / "none") == []
    (tmp_path / "torn").write_bytes(b"\x01")
    assert read_witness(tmp_path / "torn") == []


def test_the_engine_notes_every_step_and_its_end() -> None:
    noted: list[list[str]] = []
    harness = Harness()
    harness.core._witness = lambda ids: noted.append(list(ids))
    harness.core.handle(online("a", [7, 8, 9], max_tokens=2))
    harness.run()
    assert noted == [["a"], [], ["a"], []]

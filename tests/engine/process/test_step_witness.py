"""What a dead engine was running."""

import os
from collections.abc import Iterator

import pytest

from neaptide.engine.process.crash_marker import CrashMarker, create_crash_marker, read_crash_marker
from neaptide.engine.process.crash_marker_observer import CrashMarkerObserver
from tests.engine.harness import Harness, online


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_crash_marker()
    yield fd
    os.close(fd)


def test_the_running_step_is_read_back(fd: int) -> None:
    witness = CrashMarker(fd)
    assert read_crash_marker(fd) == ([], 0.0)
    witness(["chat-0", "batch_1:7"], 40.0)
    assert read_crash_marker(fd) == (["chat-0", "batch_1:7"], 40.0)
    witness(["b"], 0.25)
    assert read_crash_marker(fd) == (["b"], 0.25)


def test_nothing_runs_between_steps(fd: int) -> None:
    witness = CrashMarker(fd)
    witness(["a"], 40.0)
    witness([])
    assert read_crash_marker(fd) == ([], 0.0)


def test_the_engine_notes_every_step_and_its_end() -> None:
    noted: list[tuple[list[str], float]] = []
    harness = Harness()
    harness.core.subscribe(
        CrashMarkerObserver(lambda ids, seconds=0.0: noted.append((list(ids), seconds)))  # type: ignore[arg-type]
    )
    harness.core.handle(online("a", [7, 8, 9], max_tokens=2))
    harness.run()
    assert noted == [(["a"], 0.01), ([], 0.0), (["a"], 0.01), ([], 0.0)]

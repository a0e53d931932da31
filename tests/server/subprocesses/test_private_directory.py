"""Directories of processes that were killed go with the next one that is made; those of living ones stay."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from neaptide.server.subprocesses.private_directory import PREFIX, PrivateDirectory, remove_abandoned

HAS_ONE = """
import sys
from neaptide.server.subprocesses.private_directory import PrivateDirectory
own = PrivateDirectory()
(own.path / "engine-1.sock").touch()
print(own.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def test_what_a_killed_process_had_goes_and_what_a_living_one_has_stays(temporary: Path) -> None:
    command = [sys.executable, "-c", HAS_ONE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        ours = PrivateDirectory()
        assert (theirs / "engine-1.sock").exists()
        assert {theirs.stat().st_mode & 0o777, ours.path.stat().st_mode & 0o777} == {0o700}
        process.send_signal(signal.SIGKILL)
    ours.remove()
    assert list(temporary.iterdir()) == [theirs]
    PrivateDirectory().remove()
    assert list(temporary.iterdir()) == []


def test_what_is_no_directory_of_ours_stays(temporary: Path) -> None:
    kept = temporary / "kept"
    kept.mkdir()
    (temporary / f"{PREFIX}link").symlink_to(kept)
    (temporary / f"{PREFIX}file").touch()
    remove_abandoned()
    assert len(list(temporary.iterdir())) == 3


def test_one_that_cannot_be_held_is_used_and_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_locks(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", has_no_locks)
    one = PrivateDirectory()
    PrivateDirectory().remove()
    assert list(temporary.iterdir()) == [one.path]
    one.remove()
    assert not one.path.exists()


def test_no_descriptor_is_left(temporary: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        PrivateDirectory().remove()
    assert len(os.listdir("/proc/self/fd")) == before

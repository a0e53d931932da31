"""The engine's request log: bounded on disk, its owner's alone, and no reason for an engine to end."""

import json
import logging
import os
import stat
from pathlib import Path

import pytest

from neaptide.engine.clock import VirtualClock
from neaptide.engine.process import request_log
from neaptide.engine.process.request_log import RequestLog

LINE_BYTES = len(json.dumps({"t": 0.0, "event": "end", "id": "r0", "pid": os.getpid()})) + 1


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def write(log: RequestLog, first: int, last: int) -> None:
    for number in range(first, last):
        log.refused(f"r{number}")


def test_a_full_log_makes_room_while_the_engine_runs(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log"), VirtualClock(), 2 * LINE_BYTES, num_old=2)
    write(log, 0, 9)
    log.close()
    found = {path.name: ids(path) for path in tmp_path.iterdir()}
    assert found == {"log": ["r8"], "log.1": ["r6", "r7"], "log.2": ["r4", "r5"]}


def test_no_old_log_is_kept_where_none_is_wanted(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log"), VirtualClock(), 2 * LINE_BYTES, num_old=0)
    write(log, 0, 3)
    log.close()
    assert {path.name: ids(path) for path in tmp_path.iterdir()} == {"log": ["r2"]}


def test_the_next_engine_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    for first in (0, 1):
        log = RequestLog(str(tmp_path / "log"), VirtualClock(), 2 * LINE_BYTES, num_old=1)
        write(log, first, first + 1)
        log.close()
    assert ids(tmp_path / "log") == ["r0", "r1"]
    log = RequestLog(str(tmp_path / "log"), VirtualClock(), 2 * LINE_BYTES, num_old=1)
    write(log, 2, 3)
    log.close()
    assert ids(tmp_path / "log.1") == ["r0", "r1"]


def test_a_disk_that_refuses_to_rotate_is_reported_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    log = RequestLog(str(tmp_path / "log"), VirtualClock(), LINE_BYTES, num_old=1)

    def refuse(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(request_log.os, "replace", refuse)
        write(log, 0, 4)
    assert len(caplog.records) == 1
    write(log, 4, 5)
    log.close()
    assert ids(tmp_path / "log") == ["r4"]


def test_others_cannot_read_it_even_if_they_could(tmp_path: Path) -> None:
    (tmp_path / "log").touch(0o644)
    log = RequestLog(str(tmp_path / "log"), VirtualClock(), LINE_BYTES, num_old=1)
    write(log, 0, 2)
    log.close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}

"""EIO at ``fsync`` of SQLite's log, then a crash: what recovery finds in the log is what callers were told."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from neaptide.server.batches.storing import file_rows
from neaptide.server.batches.storing.store import Store
from tests.server.batches.test_kill_sweep import needs_strace
from tests.server.batches.victim import STRACE

NUM_WRITES = 12
VICTIM = "tests.server.batches.storing.databases.failing_disk_victim"


def told_under(data_dir: Path, trace: Path, failing: str) -> list[str]:
    """What each write of a life was told in which these syncs of the writer's thread fail.

    Strace counts calls by thread; the first two of the main thread are the start's, and have to succeed.
    """
    assert STRACE is not None
    command = [STRACE, "-f", "-qq", "-y", "-o", str(trace), "-e", "trace=fdatasync,fsync"]
    for name in ("fdatasync", "fsync"):
        command += ["-e", f"inject={name}:error=EIO:when={failing}"]
    command += ["-P", str(data_dir / "neaptide.db-wal"), sys.executable, "-m", VICTIM, str(data_dir), str(NUM_WRITES)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1]


def check(root: Path, failing: str) -> list[str]:
    data_dir = root / "data"
    store = Store(data_dir)
    store.open()
    store.close()
    told = told_under(data_dir, root / "trace", failing)
    assert len(told) == NUM_WRITES
    store.open()
    try:
        assert store.read_blocking(store.database.problems) == []
        found = Counter(name.split("-")[1] for name in store.read_blocking(file_rows.all_file_ids))
    finally:
        store.close()
    for number, line in enumerate(told):
        answer, count = line.split()
        expected = {"yes": {int(count)}, "no": {0}, "unknown": {0, int(count)}}[answer]
        assert found[str(number)] in expected, f"write {number} was told {answer}"
    return [line.split()[0] for line in told]


@needs_strace
@pytest.mark.parametrize(("failing", "refused"), [("4+5", [3, 7, 11]), (str(NUM_WRITES), [NUM_WRITES - 1])])
@pytest.mark.acceptance("A9", "EIO at a sync of the database's log, then a crash")
def test_what_was_refused_is_not_there_after_a_crash_and_what_was_acknowledged_is(
    tmp_path: Path, failing: str, refused: list[int]
) -> None:
    answers = check(tmp_path, failing)
    assert [number for number, answer in enumerate(answers) if answer == "no"] == refused
    assert Counter(answers) == {"yes": NUM_WRITES - len(refused), "no": len(refused)}


@needs_strace
@pytest.mark.full
@pytest.mark.parametrize("first", range(3, 2 * NUM_WRITES))
@pytest.mark.parametrize("failing", ["{}", "{}..{}", "{}+"])
@pytest.mark.acceptance("A9", "EIO at each sync of the database's log, at two and at all from there on, then a crash")
def test_every_sync_of_the_log_may_fail(tmp_path: Path, first: int, failing: str) -> None:
    check(tmp_path, failing.format(first, first + 1))

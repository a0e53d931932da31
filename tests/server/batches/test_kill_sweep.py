"""``kill -9`` at every system call that changes the disk, and at none: whatever was killed, nothing is lost.

Strace counts calls per thread. The service has one thread for files and one for the database here, so the Nth call
of a name is in most cases one moment; where both make the same call the one that comes to N first is killed. The
first scene begins without a database (schema, first start, end), the second with one.
"""

import asyncio
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from neaptide.server.batches.storing.store import Store
from tests.server.batches.invariants import Facts, durable_rows, violations
from tests.server.batches.victim import STRACE, Victim, recover

SYSCALLS = ("write", "pwrite64", "writev", "rename", "fsync", "fdatasync", "unlink", "ftruncate")
SCENES = ("look_in", "work")
SAMPLE = 12
SEED = 3
MAX_RESUME_S = 10.0

needs_strace = pytest.mark.skipif(STRACE is None, reason="strace is not installed: system calls cannot be hit")


def prepare(root: Path, scene: str) -> Path:
    data_dir = root / "data"
    data_dir.mkdir(parents=True)
    if scene == "work":
        store = Store(data_dir)
        store.open()
        store.close()
    return data_dir


def killed_at(root: Path, scene: str, syscall: str, number: int) -> bool:
    """One life that is killed at a call, the next one, and the judgement; False when there was no such call."""
    data_dir, facts = prepare(root, scene), Facts()
    victim = Victim(data_dir, facts, root / "trace")
    status = victim.run(scene, [syscall], f"{syscall}:signal=KILL:when={number}")
    assert status in (0, -9), f"{scene} {syscall} {number}: exit status {status}"
    durable, before = durable_rows(data_dir), Counter(facts.executions)
    resume_s = asyncio.run(recover(data_dir, facts))
    where = f"{scene}, {syscall} number {number}"
    assert not set(facts.executions - before) & durable, f"{where}: durable results were computed again"
    assert violations(data_dir, facts, crashes=1) == [], where
    assert resume_s < MAX_RESUME_S, where
    return status == -9


def points_of(root: Path, scene: str) -> list[tuple[str, str, int]]:
    """Every call of an unharmed life, as (scene, system call, number)."""
    data_dir, facts = prepare(root, scene), Facts()
    assert Victim(data_dir, facts, root / "trace").run(scene, SYSCALLS) == 0
    assert violations(data_dir, facts) == []
    calls = Counter(re.findall(r"^(\d+) +(\w+)\(", (root / "trace").read_text(), re.MULTILINE))
    most = {name: max(count for (_, called), count in calls.items() if called == name) for _, name in calls}
    return [(scene, name, number) for name in sorted(most) for number in range(1, most[name] + 1)]


@needs_strace
@pytest.mark.acceptance("A1", "SIGKILL at a system call of service, database or files, seeded", count=SAMPLE)
def test_killed_at_seeded_system_calls(tmp_path: Path) -> None:
    points = [point for scene in SCENES for point in points_of(tmp_path / scene, scene)]
    assert len(points) > 300
    killed = 0
    for scene, syscall, number in random.Random(SEED).sample(points, SAMPLE):
        killed += killed_at(tmp_path / f"{scene}-{syscall}-{number}", scene, syscall, number)
    assert killed > SAMPLE // 2  # the last calls of a life are not always there


@needs_strace
@pytest.mark.full
@pytest.mark.parametrize("syscall", SYSCALLS)
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.acceptance("A1", "SIGKILL at every call of one name in one of two lives, some 420 kills in all")
def test_killed_at_every_system_call(tmp_path: Path, scene: str, syscall: str) -> None:
    number = 1
    while killed_at(tmp_path / str(number), scene, syscall, number):
        number += 1
    print(f"{scene}: killed at {number - 1} calls of {syscall}")

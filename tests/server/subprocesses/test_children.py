"""What every child process of the server has in common."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from asyncio.subprocess import Process
from pathlib import Path

import psutil
import pytest

from neaptide.server.subprocesses import child, on_call, start
from neaptide.server.subprocesses.frames import framed, receive_frame
from neaptide.server.subprocesses.start import child_environment, end_child, start_child, without_secrets
from tests.patience import PATIENCE_S

LEAST_PRIORITY = 19


@pytest.fixture(autouse=True)
def children_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the tests as children; only our package is installed. One at idle priority is long in dying where
    others want the processor."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setattr(start, "KILL_TIMEOUT_S", PATIENCE_S)


async def started() -> Process:
    return await start_child("tests.server.subprocesses.frugal_child")


async def answer(process: Process, question: bytes | None = None) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    if question is not None:
        process.stdin.write(framed(question))
    return await receive_frame(process.stdout)


async def test_a_child_stands_behind_and_within_its_memory() -> None:
    process = await started()
    try:
        found = json.loads(await answer(process))
        assert found["niceness"] == min(psutil.Process().nice() + 3, LEAST_PRIORITY)
        assert found["scheduling"] == os.SCHED_IDLE
        assert await answer(process, b"1000000") == b"taken"
        assert await answer(process, b"1000000000") == b"refused"
    finally:
        await end_child(process)
    assert process.returncode == -signal.SIGKILL


def test_in_bursts_it_rests_after_so_much_work_and_not_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    rests_s: list[float] = []
    monkeypatch.setattr(time, "sleep", rests_s.append)
    with child.in_bursts(0.001, 0.5):
        while len(rests_s) < 3:
            sum(range(1000))
    assert set(rests_s) == {0.5}
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


async def test_what_has_ended_is_not_killed_again() -> None:
    process = await started()
    await answer(process)
    assert process.stdin is not None
    process.stdin.close()
    assert await process.wait() == 0
    await end_child(process)
    assert process.returncode == 0


@pytest.mark.parametrize("module", ["frugal_child", "child_that_imports"])
def test_a_child_does_not_outlive_its_parent_not_even_while_it_imports(module: str) -> None:
    parent = (
        "import asyncio, os, sys\n"
        "from neaptide.server.subprocesses.start import start_child\n"
        "async def main():\n"
        f"    child = await start_child('tests.server.subprocesses.{module}')\n"
        "    await child.stdout.read(4)\n"  # it has begun
        "    print(child.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):  # it is gone already
        child = os.pidfd_open(int(done.stdout))
        try:
            assert select.select([child], [], [], PATIENCE_S)[0], "it lives on"
        finally:
            os.close(child)


async def test_one_that_cannot_be_killed_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start, "KILL_TIMEOUT_S", 0.05)
    process = await started()
    kill = process.kill
    monkeypatch.setattr(process, "kill", lambda: None)
    await end_child(process)
    assert f"the process {process.pid} did not end after SIGKILL" in caplog.text
    kill()
    await process.wait()


def files_below(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()}


async def test_temporary_files_of_a_child_go_with_it(tmp_path: Path) -> None:
    one = on_call.Child("tests.server.subprocesses.child_with_files", None, 1e6, tmp_path)
    await one.wake()
    first = Path((await one.receive(PATIENCE_S)).decode())
    assert first.parent.parent == tmp_path
    assert os.stat(first.parent).st_mode & 0o777 == 0o700
    assert one.pid is not None
    os.kill(one.pid, signal.SIGKILL)
    with pytest.raises(on_call.ChildDiedError):
        await one.receive(PATIENCE_S)
    assert files_below(tmp_path) == {first}  # it could not tidy up itself
    await one.wake()
    second = Path((await one.receive(PATIENCE_S)).decode())
    assert files_below(tmp_path) == {second}
    await one.close()
    assert os.listdir(tmp_path) == []


def test_a_child_gets_no_keys_and_passwords() -> None:
    kept = {"PATH": "/bin", "HOME": "/root", "HF_HOME": "/models", "TOKENIZERS_PARALLELISM": "true", "PGHOST": "db"}
    kept |= {"HTTP_PROXY": "http://proxy", "CUDA_VISIBLE_DEVICES": "0", "MONKEY": "business"}
    secrets = ("NEAPTIDE_API_KEY", "NEAPTIDE_STORE", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")
    secrets += ("PGPASSWORD", "OPENAI_API_KEY", "AWS_SESSION_TOKEN", "vllm_api_key", "KEY", "DB_PASSWORD")
    assert without_secrets(kept | dict.fromkeys(secrets, "s3cret")) == kept
    assert "s3cret" not in child_environment(kept | dict.fromkeys(secrets, "s3cret")).values()

"""A data directory on a disk that becomes full: chats do not notice, batches wait."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import RunningServer, get_batch, result_lines, submit_batch, wait_terminal

SIM = {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": "5"}
NUM_LINES = 3000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "neaptide-test", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def chat(server: RunningServer) -> int:
    body = {"model": "neaptide-tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return server.http.post("/v1/chat/completions", json=body).status_code


def line(index: int) -> dict[str, Any]:
    return {
        "model": "neaptide-tiny",
        "messages": [{"role": "user", "content": f"number {index}"}],
        "max_tokens": 32,
        "ignore_eos": True,
    }


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as f:
        try:
            while f.write(b"\0" * 4096):
                pass
        except OSError:
            return


def is_failing(server: RunningServer) -> bool:
    return "neaptide_storage_failing 1.0" in server.http.get("/metrics").text


@pytest.mark.full
@pytest.mark.acceptance("A8", "a full file system under a running server: results, an upload and the log")
def test_chats_go_on_and_a_batch_waits_while_the_disk_is_full(small_disk: Path) -> None:
    with RunningServer(small_disk / "data", env=SIM) as server:
        batch_id = submit_batch(server, [line(i) for i in range(NUM_LINES)])
        server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] > 0)
        filler = small_disk / "filler"
        fill(filler)
        server.wait_for(lambda: is_failing(server))
        assert [chat(server) for _ in range(20)] == [200] * 20
        upload = server.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"x" * (1 << 20))}
        )
        assert upload.status_code in (503, 507)
        assert get_batch(server, batch_id)["status"] == "in_progress"
        assert server.http.get("/ready").status_code == 200
        filler.unlink()
        batch = wait_terminal(server, batch_id)
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        results = [found["custom_id"] for found in result_lines(server, batch)]
        assert results == [f"c{i}" for i in range(NUM_LINES)]
        server.wait_for(lambda: not is_failing(server))

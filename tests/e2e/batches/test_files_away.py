"""A server whose data directory, or a file of it, is moved away for a while: seen by a client over HTTP."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import RunningServer, get_batch, result_lines, submit_batch, wait_terminal

SIM = {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": "20"}
NUM_LINES = 400


def line(index: int) -> dict[str, Any]:
    return {
        "model": "neaptide-tiny",
        "messages": [{"role": "user", "content": f"number {index}"}],
        "max_tokens": 16,
        "ignore_eos": True,
    }


def texts(server: RunningServer, batch: dict[str, Any]) -> dict[str, str]:
    return {
        found["custom_id"]: found["response"]["body"]["choices"][0]["message"]["content"]
        for found in result_lines(server, batch)
    }


class Watch:
    """What a client sees of a batch's objects."""

    def __init__(self, server: RunningServer, batch_id: str) -> None:
        self._server = server
        input_id = get_batch(server, batch_id)["input_file_id"]
        self._urls = [f"/v1/files/{input_id}", f"/v1/files/{input_id}/content", f"/v1/batches/{batch_id}"]
        self.seen: set[int] = set()

    def look(self) -> None:
        self.seen |= {self._server.http.get(url).status_code for url in self._urls}
        upload = {"files": {"file": ("in.jsonl", b"x")}, "data": {"purpose": "batch"}}
        self.seen.add(self._server.http.post("/v1/files", **upload).status_code)


def is_failing(server: RunningServer) -> bool:
    return "neaptide_storage_failing 1.0" in server.http.get("/metrics").text


def one_absence(server: RunningServer, what: str, phase: str, away_s: float) -> dict[str, str]:
    """A batch during which it is away; the texts of its lines."""
    batch_id = submit_batch(server, [line(i) for i in range(NUM_LINES)])
    batch = get_batch(server, batch_id)
    if phase == "running":
        server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] >= 50)
    watch = Watch(server, batch_id)
    path = server.data_dir / {"directory": "", "input": f"files/{batch['input_file_id']}", "plans": "jobs"}[what]
    away = server.data_dir.parent / "away"
    path.rename(away)
    if what != "plans":
        server.wait_for(lambda: watch.look() or is_failing(server))
    if what == "directory":
        server.wait_for(lambda: server.http.get("/ready").status_code == 503)
    until_s = time.monotonic() + away_s
    while time.monotonic() < until_s:
        watch.look()
    away.rename(path)
    batch = wait_terminal(server, batch_id)
    assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert watch.seen <= {200, 503}
    server.wait_for(lambda: not is_failing(server))
    server.wait_ready()
    return texts(server, batch)


CASES = [("directory", "running", 0.5)]
LONG = [
    (what, phase, away_s)
    for what in ("directory", "input", "plans")
    for phase in ("validating", "running")
    for away_s in (1.0, 4.0)
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG, marks=pytest.mark.full)])
def test_what_is_away_for_a_while_ends_no_line_and_changes_none(
    tmp_path: Path, cases: list[tuple[str, str, float]]
) -> None:
    with RunningServer(tmp_path, env=SIM) as server:
        undisturbed = submit_batch(server, [line(i) for i in range(NUM_LINES)])
        right = texts(server, wait_terminal(server, undisturbed))
        for case in cases:
            assert one_absence(server, *case) == right, case
        assert "Traceback" not in server.log
        assert [path for path in server.data_dir.rglob("*") if path.stat().st_mode & 0o077] == []

"""``neaptide why`` against a real server: both processes, real sockets, the command itself."""

import subprocess
import sys
from pathlib import Path

from tests.e2e.server import RunningServer, submit_batch, wait_terminal
from tests.patience import PATIENCE_S

STEP_MS = 20
FLAGS = ("--executor", "sim", "--sim-step-ms", str(STEP_MS), "--shadow", "off")
UNKNOWN = "chatcmpl-0123456789abcdef0123456789abcdef"


def why(server: RunningServer, request_id: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "neaptide", "why", request_id, "--server", server.base_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_late_chat_and_a_batch_are_explained_by_the_command(tmp_path: Path) -> None:
    """No step is as short as the chat's target, so it is late on any machine."""
    with RunningServer(tmp_path, *FLAGS) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "ttft_slo_ms": 1}
        said = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
        explained = why(server, said["id"])
        assert explained.returncode == 0, explained.stderr
        assert explained.stdout.startswith("late by ")
        assert "; 0 ms of it by batch work: " in explained.stdout
        (wait, *_) = server.http.get(f"/admin/why/{said['id']}").raise_for_status().json()["waits"]
        assert wait["late_parts_ms"]["other"] == 0
        assert wait["parts_ms"]["own_prompt"] + wait["parts_ms"]["slow_steps"] >= STEP_MS - 0.01  # rounded
        batch_id = submit_batch(server, [{"model": "neaptide-tiny", **body}])
        wait_terminal(server, batch_id)
        for name, verb in ((batch_id, "took "), (f"{batch_id}:0", "waited ")):
            answer = server.http.get(f"/admin/why/{name}").raise_for_status().json()
            assert (answer["outcome"], answer["sentence"][: len(verb)]) == ("completed", verb)
        for name in (f"{batch_id}:1", "batch_0", "batch_0:0"):
            assert server.http.get(f"/admin/why/{name}").status_code == 404
        unknown = why(server, UNKNOWN)
        assert unknown.returncode == 1
        assert unknown.stderr.startswith("neaptide why: No chat with this id has ended in the last 15 minutes")

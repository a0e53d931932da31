"""Files and batches in a real ``vllm serve`` whose processes are killed."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.server import durable_lines, get_batch, result_lines, submit_batch, wait_terminal
from tests.patience import PATIENCE_S
from tests.vllm_plugin.server import MODEL, VllmServer, needs_plugin

# A start takes twenty seconds, and minutes on a busy machine.
pytestmark = [pytest.mark.timeout(3600), *needs_plugin]
NUM_LINES = 200
NUM_KILLS = int(os.environ.get("NEAPTIDE_TEST_KILLS", "30"))


def asking(index: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is {index % 90} + {index % 7}?"}]
    return {"model": MODEL, "messages": messages, "max_completion_tokens": 24, "ignore_eos": True}


def assert_every_line_once(server: VllmServer, batch_id: str, num_lines: int = NUM_LINES) -> None:
    batch = wait_terminal(server, batch_id)
    assert batch["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}
    assert [result["custom_id"] for result in result_lines(server, batch)] == [f"c{i}" for i in range(num_lines)]


def test_kills_of_either_process_leave_nothing_running_and_cost_no_line(tmp_path: Path) -> None:
    with VllmServer(tmp_path) as server:
        batch_id = submit_batch(server, [asking(i) for i in range(NUM_LINES)])
        server.end_by_killing(psutil.Process(server.process.pid))  # while the file is checked
        for num_done, whose in ((20, "API process"), (80, "engine")):
            server.start()
            server.wait_for(lambda least=num_done: get_batch(server, batch_id)["request_counts"]["completed"] >= least)
            server.end_by_killing(server.engine if whose == "engine" else psutil.Process(server.process.pid))
        durable = durable_lines(server.data_dir)
        assert 80 <= len(durable) < NUM_LINES
        server.start()
        assert_every_line_once(server, batch_id)


@pytest.mark.full
@pytest.mark.timeout(6 * 3600)
def test_kills_at_drawn_moments_of_every_process_leave_nothing_running_and_cost_no_line(tmp_path: Path) -> None:
    """API process, engine core and worker die in turns, after a drawn number of further lines."""
    draw, num_lines = random.Random(44), 40 * NUM_KILLS + NUM_LINES
    with VllmServer(tmp_path, "--distributed-executor-backend", "mp") as server:
        batch_id = submit_batch(server, [asking(i) for i in range(num_lines)])
        for number in range(NUM_KILLS):
            # Lines that ran at a death run in smaller groups first. Another death among these would convict one.
            least = get_batch(server, batch_id)["request_counts"]["completed"] + draw.randrange(16, 40)
            server.wait_for(lambda least=least: get_batch(server, batch_id)["request_counts"]["completed"] >= least)
            victims = psutil.Process(server.process.pid), server.engine, server.worker
            server.end_by_killing(victims[number % 3])
            server.start()
        assert_every_line_once(server, batch_id, num_lines)


def test_a_stop_keeps_the_batch(tmp_path: Path) -> None:
    with VllmServer(tmp_path) as server:
        batch_id = submit_batch(server, [asking(i) for i in range(NUM_LINES)])
        server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] >= 20)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        server.start()
        assert_every_line_once(server, batch_id)


def test_one_of_two_api_processes_serves_files_and_the_other_says_so(tmp_path: Path) -> None:
    with VllmServer(tmp_path, "--api-server-count", "2") as server:

        def ask() -> tuple[int, str]:
            reply = server.http.get("/v1/files", headers={"connection": "close"})
            return reply.status_code, reply.text

        found = dict(ask() for _ in range(2))
        server.wait_for(lambda: found.update([ask()]) or len(found) == 2)
        assert set(found) == {200, 503}
        assert "Files and batches are served by API process 0 of this server, not by this one." in found[503]

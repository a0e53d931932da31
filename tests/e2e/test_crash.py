"""Processes that are killed, and what is left of the work."""

import threading
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import (
    RunningServer,
    durable_lines,
    get_batch,
    lines_run_again,
    result_lines,
    submit_batch,
    wait_terminal,
)
from tests.patience import PATIENCE_S

SIM = {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": "4"}


def body(index: int, max_tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"What is {index % 900} + {index % 7}?"}]
    return {"model": "neaptide-tiny", "messages": messages, "temperature": 0, "max_completion_tokens": max_tokens}


def kill_midway_and_check(server: RunningServer, lines: int, max_tokens: int) -> None:
    """Live chat beside a batch; SIGKILL for both processes when about a third is done; restart; count."""
    stop = threading.Event()

    def chat() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as http:
            while not stop.is_set():
                try:
                    http.post("/v1/chat/completions", json=body(3, 8))
                except httpx.TransportError:
                    return

    batch_id = submit_batch(server, [body(i, max_tokens) for i in range(lines)])
    chatter = threading.Thread(target=chat)
    chatter.start()
    server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] >= lines // 3)
    server.kill_both()
    stop.set()
    chatter.join()
    finished = durable_lines(server.data_dir)
    executed_before = len(server.request_log())
    assert lines // 3 <= len(finished) < lines

    server.start()
    batch = wait_terminal(server, batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": lines, "completed": lines, "failed": 0}
    results = [line["custom_id"] for line in result_lines(server, batch)]
    assert results == [f"c{i}" for i in range(lines)]
    rows_again = lines_run_again(server, batch_id, executed_before)
    assert not rows_again & finished
    assert rows_again | finished == set(results)


def test_killed_midway_every_line_is_there_once_and_finished_ones_did_not_run_again(tmp_path: Path) -> None:
    # So few at once that no two thirds of them end between two looks.
    with RunningServer(tmp_path, "--max-num-seqs", "8", env=SIM) as server:
        kill_midway_and_check(server, lines=300, max_tokens=12)


@pytest.mark.full
def test_killed_midway_on_the_real_engine(tmp_path: Path) -> None:
    with RunningServer(tmp_path, "--max-model-len", "512") as server:
        kill_midway_and_check(server, lines=1000, max_tokens=2)


@pytest.mark.full
@pytest.mark.parametrize("repeat", range(5))
def test_killed_midway_many_times(tmp_path: Path, repeat: int) -> None:
    with RunningServer(tmp_path, env=SIM) as server:
        kill_midway_and_check(server, lines=400 + 37 * repeat, max_tokens=6)

"""A large batch comes in while people chat: the short form of ``benchmarks/full_load.py``."""

import os
import threading
from pathlib import Path

import httpx
import psutil

from tests.e2e.server import RunningServer, get_batch, submit_batch
from tests.patience import PATIENCE_S

LINES = 2000
SIM = {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": "4"}


def body(index: int, max_tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"What is {index} + {index % 7}? " + "Think it over again. " * 40}]
    return {"model": "neaptide-tiny", "messages": messages, "temperature": 0, "max_completion_tokens": max_tokens}


def worker_of(server: RunningServer) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    (worker,) = (child for child in children if "neaptide.server.batches.checking.worker" in child.cmdline())
    return worker


def test_2000_lines_run_beside_chats_and_the_checking_process_goes_with_the_server(tmp_path: Path) -> None:
    statuses: list[int] = []
    stop = threading.Event()

    def chat(server: RunningServer) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE_S) as http:
            while not stop.is_set():
                statuses.append(http.post("/v1/chat/completions", json=body(3, 4)).status_code)

    with RunningServer(tmp_path, env=SIM) as server:
        chatter = threading.Thread(target=chat, args=(server,))
        chatter.start()
        try:
            batch_id = submit_batch(server, [body(i, 2) for i in range(LINES)])
            server.wait_for(lambda: get_batch(server, batch_id)["request_counts"]["completed"] > 0)
        finally:
            stop.set()
            chatter.join()
        batch = get_batch(server, batch_id)
        assert batch["status"] in ("in_progress", "finalizing", "completed")
        assert batch["request_counts"]["total"] == LINES
        assert statuses
        assert set(statuses) == {200}
        worker = worker_of(server)
        assert worker.nice() > psutil.Process(server.process.pid).nice()
        os.kill(server.process.pid, 9)
        server.process.wait()
        _, alive = psutil.wait_procs([worker], timeout=PATIENCE_S)
        assert not alive

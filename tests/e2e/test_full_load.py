"""A large batch comes in while people chat, in short what ``lab/benchmarks/full_load.py`` measures, and what must not
keep them waiting beside it."""

import os
import threading
from pathlib import Path

import httpx
import psutil

from tests.e2e.server import RunningServer, get_batch, submit_batch
from tests.patience import PATIENCE_S

LINES = 2000
SIM = {"NEAPTIDE_EXECUTOR": "sim", "NEAPTIDE_SIM_STEP_MS": "4"}
AT_EXIT = """
import atexit, gc, os, sys
def note():
    if "-m" in sys.orig_argv and "neaptide" in sys.orig_argv:
        open(os.environ["FROZEN"], "w").write(f"{gc.get_freeze_count()} {len(gc.get_objects())}")
atexit.register(note)
"""
FEW_OBJECTS = 50_000
"""A full collection walks them in the time of a token. A server has imported three times as many."""


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


def test_a_full_collection_keeps_no_client_waiting(tmp_path: Path) -> None:
    """Python's garbage collector passes over what start-up has allocated."""
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "FROZEN": str(tmp_path / "frozen")}
    with RunningServer(tmp_path, "--executor", "sim", env=env) as server:
        server.http.get("/metrics").raise_for_status()
    frozen, walked = map(int, (tmp_path / "frozen").read_text().split())
    assert walked < FEW_OBJECTS < frozen

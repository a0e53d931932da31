"""SIGKILL of the engine, the API process or both at seeded moments, under load, on the real engine."""

import hashlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import RunningServer, get_batch, result_lines, submit_batch, wait_terminal
from tests.patience import PATIENCE_S, Stopwatch
from tests.server.batches.invariants import Facts, durable_rows, violations

MAX_RESUME_S = 10.0
MAX_TOKENS = 40
TARGETS = ("engine", "api", "both")


def body(index: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is {index % 900} + {index % 7}?"}]
    return {"model": "neaptide-tiny", "messages": messages, "temperature": 0, "max_completion_tokens": MAX_TOKENS}


@contextmanager
def chatting(server: RunningServer) -> Iterator[Counter[str]]:
    """Two clients that chat without a pause; counts replies and tells 5xx other than 503 apart."""
    stop = threading.Event()
    outcomes: Counter[str] = Counter()

    def chat() -> None:
        with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as http:
            while not stop.is_set():
                try:
                    status = http.post("/chat/completions", json=body(3)).status_code
                except httpx.TransportError:
                    stop.wait(0.05)
                    continue
                outcomes[str(status)] += 1
                if status == 503:
                    stop.wait(0.05)

    threads = [threading.Thread(target=chat) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def kill(server: RunningServer, target: str) -> Stopwatch:
    """Kills, and brings the API process back if it is gone; the time that is returned begins when all is ready."""
    engine, api = server.engine, server.process
    if target in ("engine", "both"):
        engine.kill()
    if target in ("api", "both"):
        api.kill()
        api.wait()
        server.start()
    else:
        server.wait_for_another_engine(engine)
    return Stopwatch()


def observe(server: RunningServer, batch_id: str, facts: Facts) -> int:
    shown = get_batch(server, batch_id)
    facts.seen.setdefault(batch_id, []).append(shown)
    return int(shown["request_counts"]["completed"])


def survive(server: RunningServer, seed: int, lines: int, facts: Facts, target: str | None = None) -> None:
    """One batch and one kill in the middle of it; of what, the seed says unless it is named."""
    rng = random.Random(seed)
    bodies = [body(1000 * seed + i) for i in range(lines)]
    batch_id = submit_batch(server, bodies)
    facts.batches[batch_id] = lines
    least = rng.randrange(5, lines // 2)
    server.wait_for(lambda: observe(server, batch_id, facts) >= least)
    target = target or rng.choice(TARGETS)
    since_ready = kill(server, target)
    finished = durable_rows(server.data_dir)
    executed = len(server.request_log())
    done = observe(server, batch_id, facts)
    server.wait_for(lambda: done == lines or observe(server, batch_id, facts) > done)
    assert since_ready.seconds < MAX_RESUME_S
    batch = wait_terminal(server, batch_id)
    facts.seen[batch_id].append(batch)
    assert batch["status"] == "completed"
    failed = [line for line in result_lines(server, batch) if line["response"]["status_code"] != 200]
    assert not failed, f"seed {seed}, {target}: {failed}"
    started = [event["id"] for event in server.request_log()[executed:] if event["event"] == "start"]
    assert not set(started) & finished, "a durable result was computed again"


def run_kills(tmp_path: Path, seeds: range, lines: int, target: str | None = None) -> None:
    facts = Facts(max_decodes=MAX_TOKENS)
    with RunningServer(tmp_path / "server", env={"NEAPTIDE_NUM_THREADS": "1"}) as server:
        with chatting(server) as outcomes:
            for seed in seeds:
                survive(server, seed, lines, facts, target)
        for file in server.http.get("/v1/files", params={"limit": 1000}).json()["data"]:
            content = server.http.get(f"/v1/files/{file['id']}/content").content
            facts.files[file["id"]] = hashlib.sha256(content).hexdigest()
        started = [event["id"] for event in server.request_log() if event["event"] == "start"]
        facts.executions = Counter(name for name in started if ":" in name)
    assert violations(server.data_dir, facts, crashes=1) == []
    assert outcomes["200"] > 0
    assert set(outcomes) <= {"200", "503"}


@pytest.mark.timeout(600)
@pytest.mark.acceptance("A1", "SIGKILL of engine, API or both under load, real engine")
def test_a_batch_survives_a_kill(tmp_path: Path) -> None:
    run_kills(tmp_path, range(1), lines=60)


@pytest.mark.full
@pytest.mark.acceptance("A1", "SIGKILL of engine, API or both under load, real engine", count=20)
def test_batches_survive_twenty_seeded_kills(tmp_path: Path) -> None:
    run_kills(tmp_path, range(20), lines=120)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_a_batch_survives_the_end_of(tmp_path: Path, target: str) -> None:
    """Each of them, on any executor that the environment names."""
    run_kills(tmp_path, range(1), lines=60, target=target)

"""A real server on vLLM's workers: processes that die, hang or are poisoned, seen from outside."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from neaptide.launch.serve import embedded_model_path
from neaptide.server.text.tokenizer import Tokenizer
from tests.e2e.server import (
    RunningServer,
    get_batch,
    result_lines,
    stop_for_good,
    stream_events,
    submit_batch,
    wait_terminal,
)
from tests.e2e.test_supervision import POISON
from tests.executors.vllm.interpreter import needs_vllm
from tests.executors.vllm.test_served import FLAGS, ask, asking
from tests.patience import PATIENCE_S, Stopwatch

pytestmark = [*needs_vllm, pytest.mark.full]

TWO_RANKS = ("--executor-arg", "tensor_parallel_size=2")
NOT_BOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def poison(how: str, rank: int = 0) -> dict[str, str]:
    """vLLM's worker of that rank ``dies`` or ``raises`` of ``POISON``."""
    token = next(t for t in Tokenizer(embedded_model_path()).encode(POISON) if t not in range(6))
    directory = str(Path(__file__).parent / "poison")
    return {"POISON_ID": str(token), "POISON_HOW": how, "POISON_RANK": str(rank), "PYTHONPATH": directory}


def ranks_of(engine: psutil.Process) -> list[psutil.Process]:
    """In their order."""
    found = [child for child in engine.children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]
    assert len(found) == 2, [child.cmdline() for child in found]
    return sorted(found, key=lambda child: child.pid)


@pytest.mark.parametrize("victim", ["engine", "server"])
def test_workers_die_with_the_engine_and_the_engine_with_the_server(tmp_path: Path, victim: str) -> None:
    with RunningServer(tmp_path, *FLAGS, *TWO_RANKS, env=NOT_BOUND) as server:
        assert ask(server).endswith("55")
        engine = server.engine
        family = engine.children(recursive=True)
        assert len(family) >= 2
        os.kill(server.process.pid if victim == "server" else engine.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs([engine, *family], timeout=PATIENCE_S)
        assert not alive


@pytest.mark.parametrize(("is_busy", "rank"), [(False, 1), (True, 0)], ids=["idle", "busy"])
def test_the_engine_ends_with_a_rank(tmp_path: Path, is_busy: bool, rank: int) -> None:
    """No process is left, another engine comes, and no line of the batch is lost or blamed."""
    with RunningServer(tmp_path, *FLAGS, *TWO_RANKS, "--max-num-seqs", "8", env=NOT_BOUND) as server:
        assert ask(server).endswith("55")
        batch_id = submit_batch(server, [asking(i) for i in range(100)]) if is_busy else ""
        server.wait_for(lambda: not is_busy or get_batch(server, batch_id)["request_counts"]["completed"])
        engine = server.engine
        family = engine.children(recursive=True)
        ranks_of(engine)[rank].kill()
        watch = Stopwatch()
        _, alive = psutil.wait_procs([engine, *family], timeout=PATIENCE_S)
        assert not alive
        assert watch.seconds < 5.0, "sooner than a silent engine is taken to hang"
        server.wait_for_another_engine(engine)
        assert ask(server).endswith("55")
        if is_busy:
            batch = wait_terminal(server, batch_id)
            assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
            assert [line["custom_id"] for line in result_lines(server, batch)] == [f"c{i}" for i in range(100)]


@pytest.mark.parametrize("how", ["raises", "raises late"])
def test_a_rank_that_raises_alone_costs_the_engine(tmp_path: Path, how: str) -> None:
    """The other waits for it in the next exchange, of this step or of the one behind it: nothing there isolates. vLLM
    itself does not hear of a late one, and goes on with a rank that lacks a token."""
    with RunningServer(tmp_path, *FLAGS, *TWO_RANKS, env=NOT_BOUND | poison(how, rank=1)) as server:
        assert ask(server).endswith("55")
        engine = server.engine
        family = engine.children(recursive=True)
        body = {"messages": [{"role": "user", "content": POISON}], "max_completion_tokens": 5}
        reply = server.http.post("/v1/chat/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
        _, alive = psutil.wait_procs([engine, *family], timeout=PATIENCE_S)
        assert not alive
        server.wait_for_another_engine(engine)
        assert "silent for too long and is killed" in server.log
        assert ask(server).endswith("55")


def test_a_request_that_raises_in_its_worker_fails_alone(tmp_path: Path) -> None:
    with RunningServer(tmp_path, *FLAGS, env=poison("raises")) as server:
        engine = server.engine
        bodies = [asking(i) for i in range(8)]
        bodies[5]["messages"][0]["content"] = POISON
        batch = wait_terminal(server, submit_batch(server, bodies))
        assert batch["request_counts"] == {"total": 8, "completed": 7, "failed": 1}
        assert failed_codes(server, batch) == {"c5": "internal_error"}
        assert server.engine.pid == engine.pid


def failed_codes(server: RunningServer, batch: dict[str, object]) -> dict[str, str]:
    """Of the lines that have an error, by their ids."""
    replies = {line["custom_id"]: line["response"]["body"] for line in result_lines(server, batch)}
    return {name: body["error"]["code"] for name, body in replies.items() if "error" in body}


def test_a_poisoned_line_is_quarantined_and_the_others_complete(tmp_path: Path) -> None:
    with RunningServer(tmp_path, *FLAGS, env=poison("dies")) as server:
        bodies = [asking(i) for i in range(4)]
        bodies[2]["messages"][0]["content"] = POISON
        batch = wait_terminal(server, submit_batch(server, bodies))
        assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
        assert failed_codes(server, batch) == {"c2": "engine_crash"}
        assert 2 <= server.log.count("the engine ended; it restarts") <= 4  # 4 suspects, 2, 1
        assert ask(server).endswith("55")


def test_a_stopped_engine_is_replaced(tmp_path: Path) -> None:
    with RunningServer(tmp_path, *FLAGS) as server:
        assert ask(server).endswith("55")
        stream = stream_events(server, asking(1) | {"max_completion_tokens": 400})
        next(stream)
        stop_for_good(server, stream)
        assert ask(server).endswith("55")

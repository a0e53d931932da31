"""Ranks that end or raise, without vLLM: of processes and functions alone."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neaptide.executors.vllm.tensor_parallel import recover, stay_down_after_a_failure
from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).parents[3]
ENGINE = """
import multiprocessing, os, sys, time
from types import SimpleNamespace
from neaptide.engine.process.parent import die_with_parent
from neaptide.executors.vllm.tensor_parallel import watch_workers

def work(ending):
    die_with_parent(os.getppid())
    if ending is not None:
        time.sleep(0.3)
        os._exit(ending) if ending >= 0 else os.kill(os.getpid(), -ending)
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(ending,), daemon=True) for ending in (None, int(sys.argv[1]))]
    for process in processes:
        process.start()
    executor = SimpleNamespace(workers=[SimpleNamespace(proc=process) for process in processes], is_failed=False)
    thread = watch_workers(executor)
    if sys.argv[2] == "asked":
        executor.shutting_down = True
    if sys.argv[2] == "seen":  # by vLLM's own watch, which is quicker
        executor.shutting_down = executor.is_failed = True
    thread.join(20)
    for process in processes:
        process.kill()
    sys.exit(77)
"""
GOES_ON = 77


@pytest.mark.parametrize(
    ("worker_status", "case", "status"),
    [
        (-signal.SIGKILL, "unasked", -signal.SIGKILL),
        (-signal.SIGSEGV, "unasked", 1),
        (0, "unasked", 1),
        (3, "seen", 1),
        (0, "asked", GOES_ON),
    ],
)
def test_the_engine_ends_with_its_worker(worker_status: int, case: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(worker_status), case],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert ("stopping the engine" in done.stderr) == (status != GOES_ON)


class Worker:
    """Of a rank; raises when it is told to."""

    def __init__(self) -> None:
        self.fails_at = ""
        self.done: list[str] = []

    def execute_model(self, order: str) -> str:
        return self._do("execute", order)

    def sample_tokens(self, mask: str) -> str:
        return self._do("sample", mask)

    def _do(self, what: str, given: str) -> str:
        if self.fails_at == what:
            raise ValueError(given)
        self.done.append(f"{what} {given}")
        return given


def fail(worker: Worker, fails_at: str, step: str) -> None:
    worker.fails_at = fails_at
    if fails_at == "sample":
        worker.execute_model(step)
    with pytest.raises(ValueError, match=step):
        getattr(worker, "execute_model" if fails_at == "execute" else "sample_tokens")(step)
    worker.fails_at, worker.done = "", []


@pytest.fixture
def worker() -> Worker:
    """Which has done a step."""
    worker = Worker()
    stay_down_after_a_failure(worker)
    assert (worker.execute_model("1"), worker.sample_tokens("1")) == ("1", "1")
    return worker


@pytest.mark.parametrize("fails_at", ["execute", "sample"])
def test_a_rank_in_which_a_step_raised_takes_none_before_it_is_told(worker: Worker, fails_at: str) -> None:
    fail(worker, fails_at, "2")
    worker.sample_tokens("2")  # it is on its way
    for _ in range(2):
        with pytest.raises(RuntimeError, match="an earlier step raised in this rank"):
            worker.execute_model("3")
        worker.sample_tokens("3")
    recover(worker, 2)
    worker.execute_model("5")
    assert worker.done == ["sample 2", "sample 3", "sample 3", "sample None", "execute 5"]


@pytest.mark.parametrize("fails_at", ["execute", "sample"])
@pytest.mark.parametrize("is_asked", [True, False])
def test_it_takes_none_after_another_that_raised_since(worker: Worker, fails_at: str, is_asked: bool) -> None:
    """The engine took the answers of the first rank to step 2, in which this one raised alone; in step 3 it raises
    itself, perhaps before it has asked the ranks."""
    fail(worker, fails_at, "2")
    if is_asked:
        with pytest.raises(RuntimeError, match="an earlier step raised in this rank"):
            worker.execute_model("3")
    recover(worker, 3)
    with pytest.raises(RuntimeError, match="an earlier step raised in this rank"):
        worker.execute_model("4")
    assert worker.done == []


def test_a_step_that_raised_is_heard_of_behind_one_that_was_not_begun(worker: Worker) -> None:
    """Step 2 is in flight when the engine fails to begin step 3."""
    fail(worker, "sample", "2")
    recover(worker, 3)
    recover(worker, 2)
    worker.execute_model("3")
    assert worker.done == ["sample None", "execute 3"]


def test_what_is_left_of_a_step_may_raise(worker: Worker) -> None:
    worker.execute_model("2")
    worker.fails_at = "sample"
    recover(worker, 2)
    worker.fails_at = ""
    worker.execute_model("3")
    assert worker.done[-1] == "execute 3"


def test_a_single_rank_lets_go_of_what_it_has() -> None:
    worker = Worker()
    worker.execute_model("1")
    recover(worker, 1)
    assert worker.done == ["execute 1", "sample None"]

"""Tensor-parallel ranks: detect divergence and shut down together."""

import logging
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

logger = logging.getLogger(__name__)

REAP_S = 1.0
"""Time for the system to report a process's exit status, which follows its end."""


# ---- in the engine's process ----


def watch_workers(executor: Any) -> threading.Thread:
    """Starts a thread that ends this process, and with it all workers, once a worker has ended unexpectedly.

    Without that worker no step can be computed. vLLM's own watch first waits 9 s, in which the other workers wait for
    the missing one and the engine for them. An idle engine would notice only at its next request.

    Args:
        executor: vLLM's ``MultiprocExecutor``.
    """
    processes = {handle.proc.sentinel: handle.proc for handle in executor.workers}

    def watch() -> None:
        ended = wait(list(processes))
        if executor.is_failed or not getattr(executor, "shutting_down", False):
            process = processes[ended[0]]
            process.join(REAP_S)
            logger.error("vLLM's worker %s ended (%s): stopping the engine", process.name, process.exitcode)
            end_like(process.exitcode)

    thread = threading.Thread(target=watch, daemon=True, name="vllm-workers")
    thread.start()
    return thread


def end_like(status: int | None) -> None:
    """Ends this process at once.

    It is killed if the worker was killed: a kill is weaker evidence against the current requests than a crash.
    """
    if status == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


# ---- inside vLLM's workers, each of which imports it ----


def stay_down_after_a_failure(worker: Any) -> None:
    """Makes a rank in which a step has raised refuse further steps until ``recover``.

    vLLM reads one rank's answers to a step. If another rank alone raises after the last exchange, it lacks tokens that
    the others have. All later text would be wrong without an error. With this, the other ranks wait for it in the next
    step, and the silent engine is replaced. If all ranks raise, the engine is notified and recovers.
    """
    execute, sample = worker.execute_model, worker.sample_tokens
    worker.neaptide_sample = sample
    worker.neaptide_num_steps = 0
    worker.neaptide_failed_step = None  # counted from 1

    def execute_model(*args: Any, **named: Any) -> Any:
        worker.neaptide_num_steps += 1
        if worker.neaptide_failed_step is not None:
            raise RuntimeError("an earlier step raised in this rank")
        return _noting(execute, *args, **named)

    def sample_tokens(*args: Any, **named: Any) -> Any:
        return _noting(sample, *args, **named)

    def _noting(run: Any, *args: Any, **named: Any) -> Any:
        try:
            return run(*args, **named)
        except Exception:
            if worker.neaptide_failed_step is None:
                worker.neaptide_failed_step = worker.neaptide_num_steps
            raise

    worker.execute_model, worker.sample_tokens = execute_model, sample_tokens


def recover(worker: Any, step: int) -> None:
    """Lets the rank accept steps again. The engine knows that a step has raised, and will describe its requests again.

    A rank that raised in an earlier step, unknown to the engine, stays down.

    Args:
        step: number of the step that raised, from 1; one more than the steps so far if no rank has received it.
    """
    failed = getattr(worker, "neaptide_failed_step", None)
    if failed is not None and failed < step:
        return
    with suppress(Exception):  # cleaning up a step may raise too
        getattr(worker, "neaptide_sample", worker.sample_tokens)(None)
    worker.neaptide_failed_step = None

"""Several ranks of one engine: they stay alike, and end together."""

import logging
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

logger = logging.getLogger(__name__)

REAP_S = 1.0
"""For the system to tell a process's status: that it ends is seen a moment before."""


# ---- in the engine's process ----


def watch_workers(executor: Any) -> threading.Thread:
    """Starts a thread that ends this process, and with it all workers, as soon as one of them has ended unasked:
    without it no step can be computed.

    vLLM's own watch gives the others 9 s first, in which they wait for the one that is gone, and the engine for them;
    and an idle engine would learn of it with its next request.

    Args:
        executor: vLLM's ``MultiprocExecutor``.
    """
    processes = {handle.proc.sentinel: handle.proc for handle in executor.workers}

    def watch() -> None:
        ended = wait(list(processes))
        if executor.is_failed or not getattr(executor, "shutting_down", False):
            process = processes[ended[0]]
            process.join(REAP_S)
            logger.error("vLLM's worker %s ended (%s), so the engine ends", process.name, process.exitcode)
            end_like(process.exitcode)

    thread = threading.Thread(target=watch, daemon=True, name="vllm-workers")
    thread.start()
    return thread


def end_like(status: int | None) -> None:
    """Ends this process at once: killed, if the worker was, which speaks less against what was being computed than a
    crash."""
    if status == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


# ---- inside vLLM's workers, each of which imports it ----


def stay_down_after_a_failure(worker: Any) -> None:
    """A rank in which a step has raised takes no other before ``recover``.

    vLLM reads one rank's answers to a step. If another alone raises, after the last exchange between them, it lacks
    tokens that the others have, and every text that follows is wrong without an error. Now the others wait for it in
    the next step, and a silent engine is replaced. If all ranks raise, the engine hears of it, and recovers.
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
    """The engine knows that a step has raised, and will say again what its requests are: the runner lets go of it.

    A rank that raised in an earlier step, of which the engine has not heard, stays down.

    Args:
        step: its number, the first is 1; one more than there were if none of the ranks has heard of it.
    """
    failed = getattr(worker, "neaptide_failed_step", None)
    if failed is not None and failed < step:
        return
    with suppress(Exception):  # what is left of a step may raise, too
        getattr(worker, "neaptide_sample", worker.sample_tokens)(None)
    worker.neaptide_failed_step = None

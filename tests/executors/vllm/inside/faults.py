"""vLLM's workers and its runner from within: to let them raise, and to see what they keep."""

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import pytest

from neaptide.executors.contract import StartedExecutor
from tests.executors.vllm.inside.worker_side import known_requests

if TYPE_CHECKING:  # ``conftest`` has something to do before vLLM is imported
    from neaptide.executors.vllm.vllm_executor import VllmExecutor

PLACES = ("before", "between", "after")
"""The forward pass, it and sampling, both."""
EVERYWHERE = (*PLACES, "late")
"""Also when the step is waited for, and the one behind it has been heard: as on a GPU, or of several ranks."""


def vllm(started: StartedExecutor) -> "VllmExecutor":
    return cast("VllmExecutor", started.executor)


def in_workers(started: StartedExecutor, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What it returns in each rank, given its worker."""
    answers: list[Any] = vllm(started)._workers.collective_rpc(function, args=args)
    return answers


def known_to_the_runner(started: StartedExecutor) -> set[str]:
    first, *others = in_workers(started, known_requests)
    assert all(other == first for other in others)
    found: set[str] = first
    return found


def num_failed_steps(caplog: pytest.LogCaptureFixture) -> int:
    """How many were taken apart or undone, whatever made them fail."""
    return sum("failed with" in record.message for record in caplog.records)


class Raises:
    """Lets vLLM's workers raise.

    Args:
        where: is asked in every step, with the ids of its requests; None lets it pass.
    """

    def __init__(
        self, workers: Any, where: Callable[[Collection[str]], str | None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._due: str | None = None
        self.num_raised = 0
        execute, sample = workers.execute_model, workers.sample_tokens

        def execute_model(order: Any, non_block: bool = False) -> Any:
            self._due = where(order.num_scheduled_tokens)
            self._raise_if_due("before")
            answer = execute(order, non_block=non_block)
            self._raise_if_due("between")
            return answer

        def sample_tokens(grammar: Any, non_block: bool = False) -> Any:
            answer = sample(grammar, non_block=non_block)
            self._raise_if_due("after")
            if self._due == "late":
                self._due = None
                self.num_raised += 1
                answer = Future()
                answer.set_exception(RuntimeError("poisoned"))
            return answer

        monkeypatch.setattr(workers, "execute_model", execute_model)
        monkeypatch.setattr(workers, "sample_tokens", sample_tokens)

    def _raise_if_due(self, here: str) -> None:
        if self._due == here:
            self._due = None
            self.num_raised += 1
            raise RuntimeError("poisoned")


class LateAnswer:
    """As of workers that are processes: whoever asks next reads what is there first, whatever it answers."""

    def __init__(self, answers: "deque[Future[Any]]", is_late: bool) -> None:
        self._answers, self._is_late = answers, is_late

    def result(self) -> Any:
        if self._is_late:
            raise TimeoutError("RPC call timed out.")
        return self._answers.popleft().result()


class Late:
    """Workers whose answers are late, in pairs, while ``is_due``; ``num_asked`` counts all that they were asked."""

    def __init__(self, workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_due, self.num_asked = False, 0
        self._answers: deque[Future[Any]] = deque()
        for name in ("execute_model", "sample_tokens"):
            monkeypatch.setattr(workers, name, self._asked(getattr(workers, name)))

    def _asked(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(order: Any, non_block: bool = False) -> Any:
            self.num_asked += 1
            self._answers.append(ask(order, non_block=True))
            answer = LateAnswer(self._answers, self.is_due)
            return answer if non_block else answer.result()

        return asked

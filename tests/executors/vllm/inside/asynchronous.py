"""vLLM's asynchronous scheduling on a CPU, where vLLM turns it off: NEAPTIDE_TEST_ASYNC=1.

V1 keeps what it samples on its device, puts -1 in its place on the host, and copies it into the inputs of the next step
for requests that were in the one before; any other request has to be told its tokens. V2 has no other way, whatever the
setting. What a GPU does at the same time as the host is not imitated: streams and events do nothing here.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest


def is_wanted() -> bool:
    return os.environ.get("NEAPTIDE_TEST_ASYNC") == "1"


def forced() -> AbstractContextManager[None]:
    """While an executor starts and serves, if it is wanted."""
    return _forced() if is_wanted() else nullcontext()


class _Nothing:
    """A stream, or an event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    synchronize = wait_stream = record


@contextmanager
def _forced() -> Iterator[None]:
    import torch

    from neaptide.executors.vllm import vllm_engine

    start = vllm_engine.start_engine

    def start_engine(*args: Any) -> Any:
        engine = start(*args)
        engine.vllm_config.scheduler_config.async_scheduling = True
        engine.model_executor.driver_worker.worker.model_runner.use_async_scheduling = True
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "start_engine", start_engine)
        for name in ("Event", "Stream", "stream", "current_stream"):
            patch.setattr(torch.cuda, name, _Nothing)
        yield

"""vLLM's engine client, as far as it is used, and when its engine ends."""

from typing import Any, Protocol


class VllmClient(Protocol):
    """What is used of ``vllm.engine.protocol.EngineClient``."""

    vllm_config: Any

    @property
    def errored(self) -> bool: ...

    def shutdown(self, timeout: float | None = None) -> None: ...


class EngineEnd:
    """Knows when vLLM's engine has ended or is about to.

    At a stop vLLM takes the engine apart while its endpoints still answer: what they say then is about no line.
    """

    def __init__(self, engine: VllmClient) -> None:
        self._engine = engine
        self._shutdown = engine.shutdown
        self._is_shut_down = False
        engine.shutdown = self._note_shutdown  # type: ignore[method-assign]

    @property
    def is_near(self) -> bool:
        return self._is_shut_down or self._engine.errored

    @property
    def was_a_crash(self) -> bool:
        return self._engine.errored and not self._is_shut_down

    def _note_shutdown(self, timeout: float | None = None) -> None:
        self._is_shut_down = True
        self._shutdown(timeout=timeout)

"""The executors by name. Only the one that is started is imported: a simulated engine does without torch.

A new executor is one line here and a factory: ``start(config: EngineConfig, clock: Clock) -> StartedExecutor``.
"""

import pkgutil

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.executors.contract import StartedExecutor

EXECUTORS: dict[str, str] = {
    "sim": "neaptide.simulation.served:start",
    "torch": "neaptide.executors.torch.start:start",
}
"""Name -> ``module:function``."""


class UnknownExecutorError(ValueError):
    """There is no executor of that name; the message lists those that there are."""


def check_executor(name: str) -> None:
    """
    Raises:
        UnknownExecutorError: no such executor.
    """
    if name not in EXECUTORS:
        raise UnknownExecutorError(f"executor = {name!r} is not supported; there are: {', '.join(sorted(EXECUTORS))}")


def start_executor(config: EngineConfig, clock: Clock) -> StartedExecutor:
    """Loads model and cache of the executor that the configuration names.

    Raises:
        UnknownExecutorError: no such executor.
        UnsupportedModelError, OSError, ValueError, RuntimeError: it cannot be started; the message says why.
    """
    check_executor(config.executor.kind)
    started: StartedExecutor = pkgutil.resolve_name(EXECUTORS[config.executor.kind])(config, clock)
    return started

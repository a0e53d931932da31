"""Starts the torch executor of an engine."""

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.executors.contract import Capabilities, StartedExecutor
from neaptide.executors.torch.torch_executor import TorchExecutor


def start(config: EngineConfig, clock: Clock) -> StartedExecutor:
    """
    Raises:
        UnsupportedModelError, OSError, ValueError, RuntimeError: as ``TorchExecutor`` does.
    """
    executor = TorchExecutor(config.executor, config.cache, clock)
    device = executor.device.type
    capabilities = Capabilities(placeholders=True, asynchronous=device == "cuda")
    return StartedExecutor(executor, device, executor.dtype_name, executor.model_config, capabilities, executor)

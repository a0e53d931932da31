"""Starts the torch executor of an engine."""

import msgspec

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.executors.contract import Capabilities, StartedExecutor
from neaptide.executors.torch.torch_executor import TorchExecutor

BLOCK_SIZE = 16
"""Tokens per KV block where that is left to us."""


def start(config: EngineConfig, clock: Clock) -> StartedExecutor:
    """
    Raises:
        UnsupportedModelError, OSError, ValueError, RuntimeError: as ``TorchExecutor`` does.
    """
    cache = msgspec.structs.replace(config.cache, block_size=config.cache.block_size or BLOCK_SIZE)
    executor = TorchExecutor(config.executor, cache, clock)
    device = executor.device.type
    capabilities = Capabilities(placeholders=True, asynchronous=device == "cuda", two_tenant_blocks=True)
    return StartedExecutor(
        executor,
        device,
        executor.dtype_name,
        executor.model_config,
        cache.block_size,
        capabilities,
        executor,
        executor.num_host_blocks,
    )

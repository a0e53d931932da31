"""Starts the torch executor of an engine."""

import msgspec

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.engine.process.arrivals import OnlineArrivals
from neaptide.executors.contract import Capabilities, StartedExecutor
from neaptide.executors.torch.torch_executor import TorchExecutor

BLOCK_SIZE = 16
"""Tokens per KV block, unless configured."""


def start(config: EngineConfig, clock: Clock) -> StartedExecutor:
    """Starts the executor.

    Raises:
        UnsupportedModelError, OSError, ValueError, RuntimeError: see ``TorchExecutor``.
    """
    cache = msgspec.structs.replace(config.cache, block_size=config.cache.block_size or BLOCK_SIZE)
    arrivals = None if config.arrivals_fd is None else OnlineArrivals(config.arrivals_fd)
    model = msgspec.structs.replace(config.executor, max_model_len=config.scheduler.max_model_len)
    executor = TorchExecutor(model, cache, clock, arrivals=arrivals)
    device = executor.device.type
    capabilities = Capabilities(
        placeholders=True,
        asynchronous=device == "cuda",
        slot_copies=True,
        abortable_steps=executor.abortable_steps,
        shared_reads=executor.shared_reads,
    )
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

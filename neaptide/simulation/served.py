"""Starts the simulated executor of a served engine: real processes and sockets, and a hash or a script as the model."""

from pathlib import Path

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.contract import Capabilities, StartedExecutor
from neaptide.executors.simulated.hash_executor import SimExecutor
from neaptide.executors.simulated.scripted import SCRIPT_FILE, Script, ScriptedExecutor
from neaptide.models.checkpoint import load_model_config

NUM_BLOCKS, BLOCK_SIZE = 4096, 16
"""Defaults."""


def start(config: EngineConfig, clock: Clock) -> StartedExecutor:
    """Starts the executor.

    Raises:
        UnsupportedModelError: the model's configuration cannot be read.
        ValueError: its script cannot be read.
    """
    directory = Path(config.executor.model_path)
    model = load_model_config(directory).ending(config.executor.eos_token_ids)
    step_time = ConstantCostModel(config.executor.sim_step_s)
    num_blocks = config.cache.num_blocks or NUM_BLOCKS
    executor: SimExecutor
    if (directory / SCRIPT_FILE).is_file():
        script = Script.load(directory, model.eos_token_ids[0])
        executor = ScriptedExecutor(num_blocks, step_time, clock, model.vocab_size, script)
    else:
        executor = SimExecutor(num_blocks, step_time, clock, model.vocab_size)
    # In tests it stands for a CPU: one step after the other.
    capabilities = Capabilities(placeholders=True, asynchronous=False)
    block_size = config.cache.block_size or BLOCK_SIZE
    return StartedExecutor(executor, "sim", "none", model, block_size, capabilities, profiled=None)

"""Composition root: builds the server, and inside the engine process the engine.

``python -m neaptide.server.launch ADDRESS CONFIG_JSON`` is how the supervisor starts an engine process. Imports
are local to the side that needs them: the API process never loads torch, the engine process no web framework.
"""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from neaptide.engine.clock import Clock, MonotonicClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.engine.messages import EngineFatal, EngineReady
from neaptide.server.settings import EMBEDDED_MODEL, Settings, SettingsError

if TYPE_CHECKING:
    from neaptide.engine.core import EngineCore

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
DEFAULT_MAX_MODEL_LEN = 8192


# ---- both sides ------------------------------------------------------------------------------------------


def embedded_model_path() -> Path:
    return Path(__file__).parents[1] / "data" / EMBEDDED_MODEL


def configure_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT, stream=sys.stderr)


# ---- engine process --------------------------------------------------------------------------------------


def build_engine(config: EngineConfig, clock: Clock) -> "tuple[EngineCore, EngineReady]":
    """The engine with its executor and models, warmed up.

    Raises:
        UnsupportedModelError, OSError, ValueError, RuntimeError: it cannot be built; the message says why.
    """
    from neaptide.engine.core import EngineCore
    from neaptide.engine.kv.headroom import FixedHeadroom
    from neaptide.engine.process import RequestLogFile
    from neaptide.engine.runner.model_config import load_model_config
    from neaptide.estimator.calibrate import calibration_shapes, warm_up
    from neaptide.estimator.iteration_time import LinearCostModel

    model = load_model_config(Path(config.executor.model_path))
    cost_model = LinearCostModel()
    executor, device, dtype = _build_executor(config, clock, model.vocab_size)
    if executor.num_blocks * config.cache.block_size < config.scheduler.max_model_len:
        raise ValueError(
            f"the KV cache holds {executor.num_blocks * config.cache.block_size} tokens, less than one request of "
            f"max_model_len = {config.scheduler.max_model_len}; raise kv_cache_gib or lower max_model_len"
        )
    scheduler = config.scheduler
    shapes = calibration_shapes(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.max_model_len)
    start_s = clock.now()
    if config.executor.kind == "torch":
        steps = list(warm_up(executor, cost_model, clock, config.cache.block_size, shapes))
        logger.info("warmed up with %d steps in %.1f s", len(steps), clock.now() - start_s)
    core = EngineCore(
        config,
        executor,
        cost_model,
        FixedHeadroom(executor.num_blocks, 1.0 - scheduler.offline_max_kv_ratio),
        clock,
        frozenset(model.eos_token_ids),
        RequestLogFile(config.request_log_path, clock) if config.request_log_path else None,
    )
    ready = EngineReady(
        model_path=config.executor.model_path,
        device=device,
        dtype=dtype,
        vocab_size=model.vocab_size,
        max_model_len=scheduler.max_model_len,
        block_size=config.cache.block_size,
        num_blocks=executor.num_blocks,
        eos_token_ids=list(model.eos_token_ids),
    )
    return core, ready


def engine_main(address: str, config_json: str) -> int:
    """Runs the engine until it is told to stop. What keeps it from starting is its last word to the server."""
    from neaptide.engine.process import EngineSocket, die_with_parent, run_engine

    die_with_parent()
    configure_logging("info")
    config = msgspec.json.decode(config_json, type=EngineConfig)
    clock = MonotonicClock()
    socket = EngineSocket(address)
    try:
        try:
            core, ready = build_engine(config, clock)
        except (OSError, ValueError, RuntimeError) as error:
            socket.send(EngineFatal(str(error)))
            return 1
        run_engine(core, ready, socket, socket, clock)
        return 0
    finally:
        socket.close()


if __name__ == "__main__":
    sys.exit(engine_main(sys.argv[1], sys.argv[2]))

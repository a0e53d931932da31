"""Starts the vllm executor of an engine. vLLM is imported here, when its environment is set."""

from pathlib import Path

from pydantic import ValidationError

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.executors.contract import Capabilities, StartedExecutor
from neaptide.executors.vllm.arguments import check_arguments
from neaptide.executors.vllm.environment import set_environment
from neaptide.models.checkpoint import load_model_facts
from neaptide.models.config import UnsupportedModelError


def start(config: EngineConfig, clock: Clock) -> StartedExecutor:
    """
    Raises:
        ValueError, RuntimeError, OSError: vLLM is not there, or does not start; the message says why.
    """
    check_arguments(config.executor.arguments)
    model = load_model_facts(Path(config.executor.model_path))
    set_environment(config.executor.num_threads)
    try:
        from neaptide.executors.grammar_masks import GrammarMasks
        from neaptide.executors.vllm.vllm_engine import start_engine
        from neaptide.executors.vllm.vllm_executor import VllmExecutor
    except ImportError as error:
        raise ValueError(
            f"executor = 'vllm' needs vLLM, which this interpreter does not have ({error}); name another with "
            "engine_python, or install neaptide[vllm]"
        ) from error
    try:
        engine = start_engine(config, POLICIES[config.scheduler.policy].step_tokens(config.scheduler))
    except UnsupportedModelError:
        raise
    except Exception as error:  # vLLM asserts much, and has errors of its own
        raise RuntimeError(f"vLLM does not start: {_reason(error)}") from error
    masks = GrammarMasks(Path(config.executor.model_path), model.vocab_size, model.eos_token_ids)
    executor = VllmExecutor(engine, config, clock, model.eos_token_ids, masks)
    # Its runner keeps the tokens that it samples: a plan need not know them.
    capabilities = Capabilities(placeholders=True, asynchronous=executor.is_asynchronous)
    return StartedExecutor(
        executor, executor.device, executor.dtype_name, model, executor.block_size, capabilities, executor
    )


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):  # its text names every field that there is
        return "; ".join(str(part["msg"]) for part in error.errors())
    return str(error) or type(error).__name__

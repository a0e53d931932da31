"""Starts the vllm executor of an engine. Imports vLLM after setting its environment."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.engine.scheduler.policies import find_policy
from neaptide.executors.contract import Capabilities, StartedExecutor
from neaptide.executors.vllm.arguments import check_arguments
from neaptide.executors.vllm.environment import set_environment
from neaptide.models.checkpoint import load_model_facts, refuse_pickles
from neaptide.models.config import ModelFacts, UnsupportedModelError

logger = logging.getLogger(__name__)

MINOR_VERSION = "0.32"
"""The vLLM version whose workers this executor drives directly. Other versions start with a warning."""
LONGEST_REASON = 600
"""Most characters of vLLM's message that are quoted."""


def start(config: EngineConfig, clock: Clock) -> StartedExecutor:
    """Starts the executor.

    Raises:
        UnsupportedModelError: the model is not supported, whatever vLLM could do with it.
        ValueError: vLLM is missing, or a value is invalid, also of an argument that only vLLM knows.
        RuntimeError, OSError: vLLM does not start. The message says why.
    """
    arguments = config.executor.arguments
    check_arguments(arguments)
    model_dir = Path(config.executor.model_path)
    model = load_model_facts(model_dir).ending(config.executor.eos_token_ids)
    if arguments.get("load_format", "").lower() != "dummy":  # without safetensors vLLM would load pickles
        refuse_pickles(model_dir)
    set_environment(config.executor.num_threads)
    import_vllm()
    with _told(model_dir, ValueError):
        vllm_config, max_step_tokens = _configured(config)
    with _told(model_dir, RuntimeError):
        return _started(config, clock, model_dir, model, vllm_config, max_step_tokens)


@contextmanager
def _told(model_dir: Path, kind: type[Exception]) -> Iterator[None]:
    """Errors of vLLM with its reason: ValueError as this kind, others as RuntimeError."""
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:  # vLLM asserts a lot, and has errors of its own
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{model_dir}: this vLLM does not know the model; it could only run code that comes with the model "
                "(auto_map), which is never run"
            ) from error
        kind = kind if isinstance(error, ValueError) else RuntimeError
        raise kind(f"vLLM does not start: {_reason(error)}") from error


def import_vllm() -> None:
    """Imports vLLM and our modules that use it.

    Raises:
        ValueError: vLLM is missing, or lacks something that we use.
    """
    version = "of an unknown version"
    try:
        import vllm

        version = str(getattr(vllm, "__version__", version))
        from neaptide.executors.vllm import vllm_engine, vllm_executor, warm_up  # noqa: F401
    except Exception as error:  # an import runs a lot of code
        if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            reason = "needs vLLM, which is not installed in this interpreter"
        else:
            reason = f"cannot use this interpreter's vLLM {version}"
        raise ValueError(
            f"executor = 'vllm' {reason} ({_reason(error)}); set engine_python to another interpreter, or install "
            f"neaptide[vllm] (vLLM {MINOR_VERSION})"
        ) from error
    if version.split(".")[:2] != MINOR_VERSION.split("."):
        logger.warning("vLLM %s: the vllm executor was written for vLLM %s", version, MINOR_VERSION)


def _configured(config: EngineConfig) -> tuple[Any, int]:
    """vLLM's configuration, and most tokens of a step."""
    from neaptide.executors.vllm.vllm_engine import configured

    max_step_tokens = find_policy(config.scheduler.policy).step_tokens(config.scheduler)
    return configured(config, max_step_tokens), max_step_tokens


def _started(
    config: EngineConfig, clock: Clock, model_dir: Path, model: ModelFacts, vllm_config: Any, max_step_tokens: int
) -> StartedExecutor:
    """Starts vLLM. If this raises, nothing of vLLM is left running."""
    from neaptide.executors.grammar_masks import GrammarMasks
    from neaptide.executors.vllm.vllm_engine import start_engine
    from neaptide.executors.vllm.vllm_executor import VllmExecutor
    from neaptide.executors.vllm.warm_up import warm_up

    engine = start_engine(vllm_config)
    with ExitStack() as undoing:
        undoing.callback(engine.shutdown)
        masks = GrammarMasks(model_dir, model.vocab_size, model.eos_token_ids)
        undoing.callback(masks.close)
        executor = VllmExecutor(engine, config, clock, model.eos_token_ids, masks)
        warm_up(executor, config.scheduler.max_num_seqs, max_step_tokens)
        undoing.pop_all()
    # vLLM's runner keeps the tokens that it samples, so a plan need not know them.
    capabilities = Capabilities(placeholders=True, asynchronous=executor.is_asynchronous)
    return StartedExecutor(
        executor,
        executor.device,
        executor.dtype_name,
        model,
        executor.block_size,
        capabilities,
        executor,
        executor.num_host_blocks,
    )


def _reason(error: Exception) -> str:
    reason = str(error) or type(error).__name__
    if isinstance(error, ValidationError):  # its text lists every field
        reason = "; ".join(str(part["msg"]) for part in error.errors())
    # For an unknown family, the message lists all known families.
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ..."

"""The executors by name. Only the one that is started is imported: a simulated engine does without torch.

A new executor is one line here and a factory: ``start(config: EngineConfig, clock: Clock) -> StartedExecutor``.
"""

import pkgutil
from collections.abc import Mapping
from typing import NamedTuple

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.executors.contract import StartedExecutor
from neaptide.extras import check_part


class Kind(NamedTuple):
    """What has to be known of an executor before it is imported."""

    factory: str
    """``module:function``."""
    package: str | None = None
    """The package that it computes with, of an extra of our distribution."""
    takes_arguments: bool = False
    """It has arguments of its own (``ExecutorConfig.arguments``)."""
    knows_families: bool = False
    """It tells itself whether it computes a model; the others compute the families of ``neaptide.models`` only."""
    has_host_cache: bool = False
    """It copies KV blocks to host memory and back (``CacheConfig.host_cache_bytes``)."""
    can_be_batch_invariant: bool = False
    """It can give a request the same bits whatever runs beside it (``ExecutorConfig.batch_invariant``)."""
    can_quantize: bool = False
    """It can compute with weights and activations of 8 bits (``ExecutorConfig.quantization``)."""
    follows_grammars: bool = False
    """It enforces what ``SamplingParams.grammar`` asks for."""
    max_masked_ends: int | None = None
    """Ends of one request, its own stop tokens and the model's, that it can hold back for ``min_tokens``; None: all."""


EXECUTORS: dict[str, Kind] = {
    "sim": Kind("neaptide.simulation.served:start"),
    "torch": Kind(
        "neaptide.executors.torch.start:start",
        package="torch",
        has_host_cache=True,
        can_be_batch_invariant=True,
        can_quantize=True,
        follows_grammars=True,
    ),
    "vllm": Kind(
        "neaptide.executors.vllm.start:start",
        takes_arguments=True,
        knows_families=True,
        has_host_cache=True,
        follows_grammars=True,
        max_masked_ends=128,
    ),
}


class UnknownExecutorError(ValueError):
    """There is no executor of that name, or none that does such things; the message says what there is."""


def check_executor(
    name: str,
    arguments: Mapping[str, str] | None = None,
    host_cache_bytes: int = 0,
    batch_invariant: bool = False,
    quantization: str = "none",
) -> Kind:
    """
    Raises:
        UnknownExecutorError: no such executor, or one that takes no arguments, keeps no blocks in host memory, cannot
            be batch-invariant or does not quantize.
    """
    if name not in EXECUTORS:
        raise UnknownExecutorError(f"executor = {name!r} is not supported; there are: {', '.join(sorted(EXECUTORS))}")
    kind = EXECUTORS[name]
    if arguments and not kind.takes_arguments:
        raise UnknownExecutorError(f"executor = {name!r} takes no arguments; {', '.join(arguments)} was given")
    if host_cache_bytes and not kind.has_host_cache:
        raise UnknownExecutorError(f"executor = {name!r} keeps no KV blocks in host memory; leave out host_cache_gib")
    if batch_invariant and not kind.can_be_batch_invariant:
        raise UnknownExecutorError(f"executor = {name!r} has no batch_invariant; it is the torch executor's")
    if quantization != "none" and not kind.can_quantize:
        raise UnknownExecutorError(
            f"executor = {name!r} has no quantization = {quantization!r}; it is the torch executor's"
        )
    return kind


def start_executor(config: EngineConfig, clock: Clock) -> StartedExecutor:
    """Loads model and cache of the executor that the configuration names.

    Raises:
        UnknownExecutorError: no such executor.
        MissingPartError: this interpreter lacks the executor's package.
        UnsupportedModelError, OSError, ValueError, RuntimeError: it cannot be started; the message says why.
    """
    executor = config.executor
    kind = check_executor(
        executor.kind,
        executor.arguments,
        config.cache.host_cache_bytes,
        executor.batch_invariant,
        executor.quantization,
    )
    if kind.package is not None:
        check_part(kind.package)
    started: StartedExecutor = pkgutil.resolve_name(kind.factory)(config, clock)
    return started

"""The executors by name. Only the one that is started is imported: a simulated engine works without torch.

A new executor needs one entry here and a factory: ``start(config: EngineConfig, clock: Clock) -> StartedExecutor``.
"""

import pkgutil
from collections.abc import Mapping
from typing import NamedTuple

from neaptide.engine.clock import Clock
from neaptide.engine.config import EngineConfig
from neaptide.executors.contract import StartedExecutor
from neaptide.extras import check_part


class Kind(NamedTuple):
    """Facts about an executor that are needed before it is imported."""

    factory: str
    """``module:function``."""
    package: str | None = None
    """The package that it computes with, of an extra of our distribution."""
    takes_arguments: bool = False
    """The executor has arguments of its own (``ExecutorConfig.arguments``)."""
    knows_families: bool = False
    """The executor checks by itself whether it supports a model. The others support the families of
    ``neaptide.models``."""
    has_host_cache: bool = False
    """The executor copies KV blocks to host memory and back (``CacheConfig.host_cache_bytes``)."""
    can_be_batch_invariant: bool = False
    """The executor can give a request the same bits whatever else runs (``ExecutorConfig.batch_invariant``)."""
    can_quantize: bool = False
    """The executor can compute with 8-bit weights and activations (``ExecutorConfig.quantization``)."""
    follows_grammars: bool = False
    """The executor enforces ``SamplingParams.grammar``."""
    max_masked_ends: int | None = None
    """Number of stop tokens, the request's and the model's, that the executor can suppress for ``min_tokens``; None:
    any."""


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
    """The executor does not exist or lacks a requested ability. The message lists the choices."""


def check_executor(
    name: str,
    arguments: Mapping[str, str] | None = None,
    host_cache_bytes: int = 0,
    batch_invariant: bool = False,
    quantization: str = "none",
) -> Kind:
    """The executor's entry, after checking that it supports the settings.

    Raises:
        UnknownExecutorError: the executor does not exist, or does not support arguments, a host cache, batch invariance
            or quantization, as requested.
    """
    if name not in EXECUTORS:
        raise UnknownExecutorError(f"executor = {name!r} is not supported; there are: {', '.join(sorted(EXECUTORS))}")
    kind = EXECUTORS[name]
    if arguments and not kind.takes_arguments:
        raise UnknownExecutorError(f"executor = {name!r} takes no arguments, but got {', '.join(arguments)}")
    if host_cache_bytes and not kind.has_host_cache:
        raise UnknownExecutorError(f"executor = {name!r} cannot keep KV blocks in host memory; remove host_cache_gib")
    if batch_invariant and not kind.can_be_batch_invariant:
        raise UnknownExecutorError(f"executor = {name!r} does not support batch_invariant; the torch executor does")
    if quantization != "none" and not kind.can_quantize:
        raise UnknownExecutorError(
            f"executor = {name!r} does not support quantization = {quantization!r}; the torch executor does"
        )
    return kind


def start_executor(config: EngineConfig, clock: Clock) -> StartedExecutor:
    """Starts the configured executor, with its model and KV cache.

    Raises:
        UnknownExecutorError: the executor does not exist.
        MissingPartError: this interpreter lacks the executor's package.
        UnsupportedModelError, OSError, ValueError, RuntimeError: the executor cannot start. The message says why.
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

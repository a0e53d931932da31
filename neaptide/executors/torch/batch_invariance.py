"""The mode in which a request's bits depend on nothing else: what it needs, and a trial of it at start.

Everything is computed in fp32 by the kernels in C, whose order of additions within a token's row is the same whatever
stands beside it: products row by row (`neaptide.kernels.linear`), attention from the first key on in tiles of one size,
nothing merged by group (`neaptide.kernels.paged_attention`), norms and rotations in one pass. Which instructions a
compiler makes of them is its own affair, so they are tried on the model itself before it is served.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from neaptide.engine.arrays import IntArray
from neaptide.engine.config import ExecutorConfig
from neaptide.executors.torch.layers.linear import Linear, use_packed
from neaptide.executors.torch.model_runner import ModelRunner
from neaptide.kernels.native import CompileError
from neaptide.kernels.paged_attention import StepTables

_TRIED_TOKENS = 70
"""Of a prompt: over two tiles of keys, and more rows than any item of attention or tile of a product."""
_PIECES = (1, 16, 1, 30, 5)
"""Tokens of the chunks of the other way; what is left is the last one."""


def pick_invariant_dtype(config: ExecutorConfig, device: torch.device) -> torch.dtype:
    """
    Raises:
        ValueError: the mode was asked for with something that it does without; one line.
    """
    if device.type != "cpu":
        raise ValueError(f"batch_invariant is for CPUs, not for device {device.type!r}")
    if config.dtype not in ("auto", "float32"):
        raise ValueError(f"batch_invariant computes in float32, not in {config.dtype!r}")
    if config.cpu_kernels == "torch":
        raise ValueError("batch_invariant needs the kernels in C: it goes with cpu_kernels = 'auto' or 'native'")
    return torch.float32


def use_invariant_products(linears: Sequence[Linear]) -> None:
    """
    Raises:
        ValueError: they cannot be compiled here.
    """
    try:
        use_packed(linears)
    except CompileError as error:
        raise ValueError(f"batch_invariant needs the products in C: {error}") from error


def try_invariance(runner: ModelRunner) -> None:
    """Computes a prompt at once, and in chunks beside others; caches of fewer than two blocks are not tried.

    Raises:
        ValueError: the bits are not the same.
    """
    config = runner.model.config
    each = (len(runner.kv_cache[0]) // 2) * runner.block_size
    tokens = torch.arange(min(_TRIED_TOKENS, each, config.max_position_embeddings)) * 7919 % config.vocab_size
    if not len(tokens):
        return
    blocks = np.arange(-(-len(tokens) // runner.block_size))
    tables = np.stack((blocks, blocks + len(blocks)))
    whole = _compute(runner, tokens, [(0, len(tokens))], tables[:1])
    computed = 0
    pieces: list[Tensor] = []
    while computed < len(tokens):
        end = min(len(tokens), computed + _PIECES[len(pieces)]) if len(pieces) < len(_PIECES) else len(tokens)
        # The first prompt computes its last token again beside every piece: the same numbers into the same slots.
        parts = [(computed, end), (len(tokens) - 1, len(tokens))]
        pieces.append(_compute(runner, tokens, parts, tables[::-1])[: end - computed])
        computed = end
    logits, alone = runner.model.logits(whole), runner.model.logits(whole[-1:])
    if not torch.equal(torch.cat(pieces), whole) or not torch.equal(logits[-1:], alone):
        raise ValueError("batch_invariant cannot be had here: the compiler's code adds in another order beside others")


def _compute(runner: ModelRunner, tokens: Tensor, parts: Sequence[tuple[int, int]], tables: IntArray) -> Tensor:
    """Hidden states of these positions of the prompt, part after part; each part has a table of its own."""
    first, end = np.array(parts).T
    positions = torch.cat([torch.arange(*part) for part in parts])
    plan = runner.plan_attention(end - first, end, StepTables.of(tables))
    return runner.model.forward(tokens[positions], positions, runner.kv_cache, plan).clone()

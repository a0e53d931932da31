"""Batch-invariant mode: its requirements, and a trial at start.

In this mode a request's bits depend on nothing else. The C kernels compute everything in fp32, and sum each token's row
in the same order whatever else the step has. Products run row by row (`neaptide.kernels.linear`). Attention starts at
the first key, in tiles of one size, and merges no groups (`neaptide.kernels.paged_attention`). Norms and rotations run
in one pass. The compiler may still reorder, so the mode is tried on the model before it is served.
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
"""Prompt tokens of the trial: over two tiles of keys, and more rows than any attention item or product tile."""
_PIECES = (1, 16, 1, 30, 5)
"""Chunk sizes of the second computation; the last chunk takes the rest."""


def pick_invariant_dtype(config: ExecutorConfig, device: torch.device) -> torch.dtype:
    """The dtype of the mode.

    Raises:
        ValueError: another setting contradicts the mode. The message is one line.
    """
    if device.type != "cpu":
        raise ValueError(f"batch_invariant needs a CPU, not device {device.type!r}")
    if config.dtype not in ("auto", "float32"):
        raise ValueError(f"batch_invariant computes in float32, not in {config.dtype!r}")
    if config.cpu_kernels == "torch":
        raise ValueError("batch_invariant needs the C kernels: cpu_kernels must be 'auto' or 'native'")
    return torch.float32


def use_invariant_products(linears: Sequence[Linear]) -> None:
    """Computes all linear layers with the C product.

    Raises:
        ValueError: the C product does not compile here.
    """
    try:
        use_packed(linears)
    except CompileError as error:
        raise ValueError(f"batch_invariant needs the C product: {error}") from error


def try_invariance(runner: ModelRunner) -> None:
    """Computes a prompt at once, and in chunks next to another request. Caches under two blocks are not tried.

    Raises:
        ValueError: the bits differ.
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
        # With every chunk, the first prompt recomputes its last token: the same numbers into the same slots.
        parts = [(computed, end), (len(tokens) - 1, len(tokens))]
        pieces.append(_compute(runner, tokens, parts, tables[::-1])[: end - computed])
        computed = end
    logits, alone = runner.model.logits(whole), runner.model.logits(whole[-1:])
    if not torch.equal(torch.cat(pieces), whole) or not torch.equal(logits[-1:], alone):
        raise ValueError(
            "batch_invariant is not available here: the compiled code sums in a different order next to other requests"
        )


def _compute(runner: ModelRunner, tokens: Tensor, parts: Sequence[tuple[int, int]], tables: IntArray) -> Tensor:
    """Hidden states of these prompt positions, part after part. Each part has its own block table."""
    first, end = np.array(parts).T
    positions = torch.cat([torch.arange(*part) for part in parts])
    plan = runner.plan_attention(end - first, end, StepTables.of(tables))
    return runner.model.forward(tokens[positions], positions, runner.kv_cache, plan).clone()

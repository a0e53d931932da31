"""What the executor asks of a model, whatever its family."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from neaptide.engine.process.arrivals import OnlineArrivals
from neaptide.executors.torch.layers.linear import Linear
from neaptide.executors.torch.layers.products import TILE_ROWS
from neaptide.kernels.layer_ops import TorchLayerOps
from neaptide.kernels.paged_attention import StepAttention
from neaptide.models.config import ModelConfig


def row_tiles(hidden: Tensor) -> Sequence[Tensor]:
    """Rows of [num_tokens, hidden_size] that a feed-forward takes one run after the other: all at once on a GPU, on a
    CPU no more than a product computes at once, so that what lies between its two products needs no second copy."""
    is_one = hidden.shape[0] <= TILE_ROWS or hidden.device.type != "cpu"  # a split of one costs as much as a norm
    return (hidden,) if is_one else torch.split(hidden, TILE_ROWS)


Layer = TypeVar("Layer")


class StepGivenUp(Exception):
    """An online request is on its way, and the step that is computed may be given up for it."""


class GivingUp(NamedTuple):
    """Of a step that may be given up."""

    arrivals: OnlineArrivals
    """For whom."""
    share: float
    """Of its layers: in the others it goes on."""

    def check(self, layer: int, num_layers: int) -> None:
        """
        Raises:
            StepGivenUp: before this layer.
        """
        if layer < self.share * num_layers and self.arrivals.are_on_their_way:
            raise StepGivenUp


def in_turn(
    layers: Sequence[Layer], kv_cache: Sequence[Tensor], giving_up: GivingUp | None
) -> Iterator[tuple[Layer, Tensor]]:
    """The layers of a step, each with its part of the cache.

    Raises:
        StepGivenUp: before one of them.
    """
    for index, (layer, layer_cache) in enumerate(zip(layers, kv_cache, strict=True)):
        if giving_up is not None:
            giving_up.check(index, len(layers))
        yield layer, layer_cache


class Destination(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    shape: tuple[int, ...]
    """Shape that the checkpoint must have."""
    view: Tensor
    """Part of our storage that takes it, after a reshape to the view's shape."""


class TorchModel(Protocol):
    """A decoder over a flat batch of tokens and a paged KV cache.

    Weights are uninitialised until `weights.load_weights` has run.
    """

    config: ModelConfig
    launches_by_size: ClassVar[bool] = False
    """Whether what ``forward`` launches on a GPU depends on nothing but the number of tokens and the plan's tensors, so
    that it can be recorded and replayed."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: TorchLayerOps) -> None: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: list[Tensor],
        plan: StepAttention,
        giving_up: GivingUp | None = None,
    ) -> Tensor:
        """Hidden states before the final norm, [num_tokens, hidden_size].

        Args:
            token_ids: [num_tokens] int64.
            positions: [num_tokens] int64.
            kv_cache: per layer [num_blocks, block_size, 2 * num_kv_heads, head_dim]; the tokens' slots are written.
            plan: what every token may attend to.
            giving_up: None for a step that is computed to its end.

        Raises:
            StepGivenUp: some of the slots are written.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] fp32."""
        ...

    def linears(self) -> list[Linear]:
        """Every linear layer, that of the logits last, to choose how they are computed when the weights are loaded."""
        ...

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name -> place, for every tensor that the checkpoint must hold."""
        ...

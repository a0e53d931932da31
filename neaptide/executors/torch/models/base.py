"""The interface between the executor and a model of any family."""

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
    """Runs of rows of [num_tokens, hidden_size] for the feed-forward layers.

    A GPU takes all rows at once. A CPU takes one product's rows, so that the intermediate values need no second copy.
    """
    is_one = hidden.shape[0] <= TILE_ROWS or hidden.device.type != "cpu"  # a split into one costs as much as a norm
    return (hidden,) if is_one else torch.split(hidden, TILE_ROWS)


Layer = TypeVar("Layer")


class StepAborted(Exception):
    """The step was aborted because an online request is arriving."""


class GivingUp(NamedTuple):
    """When a step may be aborted."""

    arrivals: OnlineArrivals
    """The online arrivals that abort the step."""
    share: float
    """Fraction of the layers before which the step may be aborted."""

    def check(self, layer: int, num_layers: int) -> None:
        """Aborts the step if an online request is arriving and the layer is within ``share``.

        Raises:
            StepAborted: the step ends before this layer.
        """
        if layer < self.share * num_layers and self.arrivals.are_on_their_way:
            raise StepAborted


def in_turn(
    layers: Sequence[Layer], kv_cache: Sequence[Tensor], giving_up: GivingUp | None
) -> Iterator[tuple[Layer, Tensor]]:
    """The layers of a step, each with its part of the cache.

    Raises:
        StepAborted: an online request arrived before one of them.
    """
    for index, (layer, layer_cache) in enumerate(zip(layers, kv_cache, strict=True)):
        if giving_up is not None:
            giving_up.check(index, len(layers))
        yield layer, layer_cache


class Destination(Protocol):
    """The place of a checkpoint's tensor in the model."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint must have."""
        ...

    def fill(self, tensor: Tensor) -> None:
        """Copies the tensor, which has that shape, into the model."""
        ...


class Rows(NamedTuple):
    """A part of the model's storage that takes a tensor as it is."""

    shape: tuple[int, ...]
    storage: Tensor

    def fill(self, tensor: Tensor) -> None:
        self.storage.copy_(tensor)

    @classmethod
    def of(cls, storage: Tensor) -> "Rows":
        """Takes a tensor of the storage's own shape."""
        return cls(tuple(storage.shape), storage)


class RotaryRows(NamedTuple):
    """Rows of heads whose rotated dimensions are interleaved: pairs are adjacent in storage, while the checkpoint has
    the two halves one after the other. Other dimensions stay as they are."""

    shape: tuple[int, ...]
    storage: Tensor
    head_dim: int
    rotary_dim: int

    def fill(self, tensor: Tensor) -> None:
        storage, heads = (x.view(-1, self.head_dim, *x.shape[1:]) for x in (self.storage, tensor))
        num_heads, half, *rest = (len(heads), self.rotary_dim // 2, *heads.shape[2:])
        pairs = storage[:, : self.rotary_dim].view(num_heads, half, 2, *rest).transpose(1, 2)
        pairs.copy_(heads[:, : self.rotary_dim].reshape(num_heads, 2, half, *rest))
        storage[:, self.rotary_dim :].copy_(heads[:, self.rotary_dim :])


class Stacked(NamedTuple):
    """Several destinations whose tensors are one in the checkpoint, along the first dimension."""

    parts: Sequence[Destination]

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [part.shape for part in self.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def fill(self, tensor: Tensor) -> None:
        for part, rows in zip(self.parts, torch.split(tensor, [part.shape[0] for part in self.parts]), strict=True):
            part.fill(rows)


class ByHead(NamedTuple):
    """Destinations of queries, keys and values that alternate head by head in one tensor of the checkpoint."""

    parts: Sequence[Destination]
    head_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return Stacked(self.parts).shape

    def fill(self, tensor: Tensor) -> None:
        heads = tensor.reshape(-1, len(self.parts), self.head_dim, *tensor.shape[1:])
        for part, rows in zip(self.parts, heads.unbind(1), strict=True):
            part.fill(rows.flatten(0, 1))


class Transposed(NamedTuple):
    """A weight that the checkpoint has as [in_features, out_features]."""

    to: Destination

    @property
    def shape(self) -> tuple[int, ...]:
        return self.to.shape[::-1]

    def fill(self, tensor: Tensor) -> None:
        self.to.fill(tensor.t())


class Shifted(NamedTuple):
    """A weight to which a constant is added."""

    to: Destination
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.to.shape

    def fill(self, tensor: Tensor) -> None:
        self.to.fill(tensor.float() + self.offset)


class TorchModel(Protocol):
    """A decoder over a flat batch of tokens and a paged KV cache.

    Weights are uninitialised until `weights.load_weights` has run.
    """

    config: ModelConfig
    launches_by_size: ClassVar[bool] = False
    """Whether GPU launches of ``forward`` depend only on the number of tokens and the plan's tensors. They can then be
    recorded and replayed."""

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
            giving_up: None for a step that cannot be aborted.

        Raises:
            StepAborted: only part of the slots is written.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] fp32."""
        ...

    def linears(self) -> list[Linear]:
        """All linear layers, with the logits' layer last. The loader chooses their products."""
        ...

    def destinations(self) -> dict[str, Destination]:
        """Checkpoint name -> destination, for every tensor that the checkpoint must hold."""
        ...

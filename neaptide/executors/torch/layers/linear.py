"""Linear layers over a flat batch of tokens."""

import logging
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from neaptide.engine.clock import Clock
from neaptide.executors.torch.device import free_bytes
from neaptide.executors.torch.layers import products
from neaptide.executors.torch.layers.products import (
    QUANTIZED,
    Product,
    TorchProduct,
    is_small,
    product_kinds,
    rows_by_kind,
)
from neaptide.executors.torch.layers.quantized import quantized_product
from neaptide.kernels.linear import PackedLinear
from neaptide.kernels.row_quantization import RowQuantizer

logger = logging.getLogger(__name__)

_ROOM = 4
"""Times the weights: so much memory has to be free for a second copy of them."""


class Linear:
    """``y = x W^T + b``; several projections of the same input are stacked in one weight."""

    __slots__ = ("_limits", "_products", "bias", "weight")

    def __init__(
        self,
        out_features: int,
        in_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight: Tensor | None = None,
    ):
        """``weight``: one that others use too."""
        if weight is None:
            weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight: Tensor | None = weight
        """None when no way that the layer is computed reads it as it is."""
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._limits: list[int] = []
        """Most rows of each product but the last."""
        self._products: list[Product] = [TorchProduct(weight, self.bias)]

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        return self.product_of(x.shape[0])(x)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += x W^T + b`` in place."""
        self.product_of(x.shape[0]).add_to(residual, x)

    def use(self, limits: Sequence[int], chosen: Sequence[Product]) -> None:
        """From now on ``chosen[i]`` computes what has ``limits[i]`` rows at most, the last one all above."""
        self._limits, self._products = list(limits), list(chosen)
        if not any(isinstance(product, TorchProduct) for product in chosen):
            self.weight = None

    def most_rows_in_c(self) -> int:
        """So many are computed by one product that a recording notes, and so are fewer; 0 if not even one row is."""
        first = self._products[0]
        if not first.is_noted:
            return 0
        others = zip(self._limits, self._products[1:], strict=True)
        return next((limit for limit, product in others if product is not first), sys.maxsize)

    def product_of(self, rows: int) -> Product:
        """What computes so many rows."""
        for limit, product in zip(self._limits, self._products, strict=False):
            if rows <= limit:
                return product
        return self._products[-1]


def choose_products(
    linears: Sequence[Linear], kernels: str, clock: Clock, quantizer: RowQuantizer | None = None
) -> None:
    """Lets loaded layers be computed in the way that measures best, by shape and rows; copies of weights that are then
    not read any more are dropped.

    Args:
        linears: of a model, all on one device, the last one that of the logits.
        kernels: ``torch`` leaves them as they are.
        clock: times the ways.
        quantizer: products of 8-bit numbers are among the ways, but for logits and for small weights; None: they are
            not.
    """
    by_shape: dict[tuple[torch.Size, bool, bool], list[Linear]] = defaultdict(list)
    for linear in linears:
        assert linear.weight is not None, "it has been chosen already"
        by_shape[linear.weight.shape, linear.bias is None, linear is linears[-1]].append(linear)
    has_no_room = _has_no_room(linears)
    num_quantized = 0
    for (shape, _, is_last), same in by_shape.items():
        first = same[0].weight
        assert first is not None
        kinds = product_kinds(first, same[0].bias, kernels)
        if quantizer is not None and not is_last and not is_small(first):
            kinds[QUANTIZED] = partial(quantized_product, quantizer=quantizer)
        if list(kinds) == ["torch"]:
            continue
        num_bytes = first.numel() * first.itemsize
        if is_small(first):
            chosen = {1: next(iter(kinds))}
        else:
            count = max(1, products.SAMPLE_BYTES // num_bytes)
            samples = [(each.weight, each.bias) for each in same[:count] if each.weight is not None]
            deadline_s = clock.now() + products.BUDGET_S / len(by_shape)
            chosen = rows_by_kind(samples, kinds, clock, deadline_s, one_kind=has_no_room)
        logger.info("linear layers of %d x %d: %s", *shape, _as_text(chosen))
        num_quantized += len(same) * (QUANTIZED in chosen.values())
        for linear in same:
            _use(linear, kinds, chosen)
    if quantizer is not None and not num_quantized:
        logger.warning("no layer is quantized: none is faster so, or large enough for it to matter")


def _has_no_room(linears: Sequence[Linear]) -> bool:
    """For a second copy of the weights, which few rows take that another kind computes, and the cache beside it."""
    weights = [linear.weight for linear in linears if linear.weight is not None]
    free = free_bytes(weights[0].device) if weights else None
    return free is not None and free < _ROOM * sum(weight.numel() * weight.itemsize for weight in weights)


def quantize(linears: Sequence[Linear], quantizer: RowQuantizer) -> None:
    """Lets all loaded layers but the last, that of the logits, be computed with 8-bit numbers, faster or not."""
    for linear in linears[:-1]:
        assert linear.weight is not None, "it has been chosen already"
        linear.use([], [quantized_product(linear.weight, linear.bias, quantizer)])


def use_packed(linears: Sequence[Linear]) -> None:
    """Lets loaded layers be computed by the product in C whatever the rows: a row's bits do not depend on the others.

    Raises:
        CompileError: it cannot be compiled here.
    """
    for linear in linears:
        assert linear.weight is not None, "it has been chosen already"
        linear.use([], [PackedLinear(linear.weight, linear.bias)])


def _use(linear: Linear, kinds: Mapping[str, products.MakeProduct], chosen: Mapping[int, str]) -> None:
    assert linear.weight is not None
    made = {name: kinds[name](linear.weight, linear.bias) for name in set(chosen.values())}
    rows = list(chosen)
    limits = [2 * low for low in rows[:-1]]  # halfway to the next, as factors go
    linear.use(limits, [made[name] for name in chosen.values()])


def _as_text(chosen: Mapping[int, str]) -> str:
    names = list(chosen.values())
    starts = [
        (rows, name) for (rows, name), before in zip(chosen.items(), [None, *names], strict=False) if name != before
    ]
    return ", ".join(f"{name} from {rows} rows" for rows, name in starts)

"""Linear layers over a flat batch of tokens."""

import logging
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

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
from neaptide.kernels.row_quantization import ByteProduct

logger = logging.getLogger(__name__)

_ROOM = 4
"""A second copy of the weights needs free memory of this many times their size."""


class Linear:
    """``y = x W^T + b``; projections of the same input are stacked in one weight."""

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
        """Creates the layer; ``weight`` may be shared with another layer."""
        if weight is None:
            weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight: Tensor | None = weight
        """None if none of the chosen products reads the original weight."""
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
        """Sets the products: ``chosen[i]`` computes up to ``limits[i]`` rows, the last one any number."""
        self._limits, self._products = list(limits), list(chosen)
        if not any(isinstance(product, TorchProduct) for product in chosen):
            self.weight = None

    def most_rows_in_c(self) -> int:
        """Most rows for which the first product computes everything and can be recorded; 0 if it cannot be recorded."""
        first = self._products[0]
        if not first.is_noted:
            return 0
        others = zip(self._limits, self._products[1:], strict=True)
        return next((limit for limit, product in others if product is not first), sys.maxsize)

    def product_of(self, rows: int) -> Product:
        """The product for this many rows."""
        for limit, product in zip(self._limits, self._products, strict=False):
            if rows <= limit:
                return product
        return self._products[-1]


def choose_products(linears: Sequence[Linear], kernels: str, clock: Clock, *, may_quantize: bool = False) -> None:
    """Chooses each layer's fastest products by measurement, by shape and rows. Weight copies that become unused are
    dropped.

    Args:
        linears: the model's layers on one device, with the logits' layer last.
        kernels: ``torch`` changes nothing.
        clock: times the products.
        may_quantize: adds 8-bit products to the choice, except for logits and small weights.
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
        if may_quantize and not is_last and not is_small(first) and ByteProduct.takes(first.dtype, first.shape[1]):
            kinds[QUANTIZED] = quantized_product
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
        logger.debug("linear layers of %d x %d: %s", *shape, _as_text(chosen))
        num_quantized += len(same) * (QUANTIZED in chosen.values())
        for linear in same:
            _use(linear, kinds, chosen)
    if may_quantize and not num_quantized:
        logger.warning("no layer is quantized: 8-bit products are not faster here, or the layers are too small")


def _has_no_room(linears: Sequence[Linear]) -> bool:
    """Whether memory lacks room for a second copy of the weights and the KV cache."""
    weights = [linear.weight for linear in linears if linear.weight is not None]
    free = free_bytes(weights[0].device) if weights else None
    return free is not None and free < _ROOM * sum(weight.numel() * weight.itemsize for weight in weights)


def quantize(linears: Sequence[Linear]) -> None:
    """Makes loaded layers use 8-bit products, faster or not."""
    for linear in linears:
        assert linear.weight is not None, "it has been chosen already"
        linear.use([], [quantized_product(linear.weight, linear.bias)])


def use_packed(linears: Sequence[Linear]) -> None:
    """Makes loaded layers use the C product for any number of rows, so that a row's bits do not depend on others.

    Raises:
        CompileError: the C product does not compile here.
    """
    for linear in linears:
        assert linear.weight is not None, "it has been chosen already"
        linear.use([], [PackedLinear(linear.weight, linear.bias)])


def _use(linear: Linear, kinds: Mapping[str, products.MakeProduct], chosen: Mapping[int, str]) -> None:
    assert linear.weight is not None
    made = {name: kinds[name](linear.weight, linear.bias) for name in set(chosen.values())}
    rows = list(chosen)
    limits = [2 * low for low in rows[:-1]]  # the geometric middle to the next measured size
    linear.use(limits, [made[name] for name in chosen.values()])


def _as_text(chosen: Mapping[int, str]) -> str:
    names = list(chosen.values())
    starts = [
        (rows, name) for (rows, name), before in zip(chosen.items(), [None, *names], strict=False) if name != before
    ]
    return ", ".join(f"{name} from {rows} rows" for rows, name in starts)

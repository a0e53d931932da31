"""Products of linear layers on a CPU, chosen by measurement when the model is loaded.

Which product is fastest depends on the processor, the shape and the rows. BLAS libraries pack the weight again in every
call, which does not pay off for a few rows. Some CPUs have matrix instructions that only some libraries use.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from neaptide.engine.clock import Clock
from neaptide.kernels.linear import DTYPES, PackedLinear, multiplies_pairs
from neaptide.kernels.native import CompileError

logger = logging.getLogger(__name__)

MEASURED_ROWS = (64, 4, 16, 256, 1)
"""Measured in this order; each stands for up to twice as many rows.

1 comes last: the best product for one row may be many times slower for the rows of a prompt.
"""
FEW_ROWS = 8
"""Steps of at most this many rows prefer the C product.

A step that uses only C products is one recorded call, and with few rows the calls take much of the time.
"""
_ALWAYS_MEASURED = 2
"""Minimum number of measured row counts, however long they take: a busy machine takes many times longer."""
BUDGET_S = 0.8
"""Time budget for all shapes of a model, in equal shares. Row counts that were not measured use the next measured
choice."""
_REPEATS = 4
SAMPLE_BYTES = 32 << 20
"""Total weights per shape that are measured in turn. As in a step, none of them stays in a small cache."""
UNMEASURED_BYTES = 1 << 18
"""Smaller weights use the first kind: a measurement would time the calls, not the products."""
_CLEARLY_FASTER = 0.85
"""A second kind for some rows needs a second copy of the weights. It must take less than this fraction of the time."""
_FAR_FASTER = 0.6
"""For a few rows, another kind must take less than this fraction of the C product's time.

One recorded call saves a quarter of a step, which no single product shows. The noise of a start must not decide.
"""


TILE_ROWS = 512
"""More rows are split into products of this many rows: packing and reading the weight has then paid off."""
_SMALL_WEIGHT_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, TILE_ROWS)
"""Row counts of products with weights below ``UNMEASURED_BYTES``, whose product takes little longer than the call."""
_ROUNDING = {64: 1, 128: 4, 256: 8, TILE_ROWS: 16}
"""Rounding of row counts up to the key, for larger weights: 2% more rows on average above 64, at most 6%."""


def rounded_up(rows: int, *, is_small: bool) -> int:
    """The number of rows that the product is made for.

    oneDNN keeps code and memory (0.1 to 0.6 MB) for every shape it has seen, even after its cache has evicted the
    shape. A step may have any number of rows, so products are made for few sizes.

    Args:
        rows: 1 to ``TILE_ROWS``.
    """
    if is_small:
        return next(each for each in _SMALL_WEIGHT_ROWS if each >= rows)
    step = next(step for most, step in _ROUNDING.items() if rows <= most)
    return -(-rows // step) * step


ROUNDED_UP = {
    small: (0, *(rounded_up(rows, is_small=small) for rows in range(1, TILE_ROWS + 1))) for small in (False, True)
}
"""``rounded_up`` by whether the weight is small. A table, because a step of a few decodes needs a product every
0.1 ms."""


def is_small(weight: Tensor) -> bool:
    """Whether products of the weight are too small to be measured or made for many row counts."""
    return weight.numel() * weight.itemsize < UNMEASURED_BYTES


class TiledProduct:
    """A product made for few shapes: rows are split into tiles, and the last tile is padded with zeros.

    Args:
        compute: [rows, in_features] -> [rows, out_features].
        weight: [out_features, in_features].
    """

    __slots__ = ("_compute", "_out_features", "_rounded_up", "_zeros")

    is_noted: ClassVar[bool] = False

    def __init__(self, compute: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        self._compute = compute
        self._rounded_up = ROUNDED_UP[is_small(weight)]
        most = max(more - rows for rows, more in enumerate(self._rounded_up))
        # One copy appends them to the rows. ``F.pad`` would fill the whole result first, which takes twice the time.
        self._zeros = weight.new_zeros(most, weight.shape[1])
        self._out_features = weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= TILE_ROWS:
            return self._tile(x)
        y = x.new_empty(x.shape[0], self._out_features)
        for rows, part in zip(torch.split(y, TILE_ROWS), torch.split(x, TILE_ROWS), strict=True):
            rows.copy_(self._tile(part))
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        if x.shape[0] <= TILE_ROWS:
            residual.add_(self._tile(x))
            return
        for rows, part in zip(torch.split(residual, TILE_ROWS), torch.split(x, TILE_ROWS), strict=True):
            rows.add_(self._tile(part))

    def _tile(self, x: Tensor) -> Tensor:
        """One tile. Rows of zeros do not change those of ``x`` and are cut off."""
        rows = x.shape[0]
        more = self._rounded_up[rows] - rows
        return self._compute(torch.cat((x, self._zeros[:more])))[:rows] if more else self._compute(x)


class Product(Protocol):
    """``x W^T + b``."""

    is_noted: ClassVar[bool]
    """Whether all its computation is calls that a ``Recording`` can record."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += x W^T + b`` in place."""
        ...


class TorchProduct:
    """Torch's product with the original weight."""

    __slots__ = ("_tiled", "bias", "weight")

    is_noted: ClassVar[bool] = False

    _PADDED_ROWS = range(8, 16)
    """On a CPU (fp32, one thread) products of 8 to 15 rows take up to 1.5 times as long as those of 16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        by_onednn = weight.device.type == "cpu" and weight.dtype != torch.float32
        self._tiled = TiledProduct(lambda x: F.linear(x, weight, bias), weight) if by_onednn else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._tiled is not None:
            return self._tiled(x)
        rows = x.shape[0]
        if rows in self._PADDED_ROWS and x.device.type == "cpu":
            x = F.pad(x, (0, 0, 0, self._PADDED_ROWS.stop - rows))
        return F.linear(x, self.weight, self.bias)[:rows]

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds within the matrix product, unless oneDNN computes it."""
        if self._tiled is not None:
            self._tiled.add_to(residual, x)
            return
        if x.shape[0] in self._PADDED_ROWS and x.device.type == "cpu":
            residual.add_(self(x))
            return
        residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)


class OnednnProduct(TiledProduct):
    """oneDNN with a weight packed once, by the operators that torch's compiler uses when it freezes a model."""

    __slots__ = ()

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)

        def compute(x: Tensor) -> Tensor:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return product

        super().__init__(compute, weight)


MakeProduct = Callable[[Tensor, Tensor | None], Product]

NATIVE = "native"
"""The C product."""
QUANTIZED = "w8a8"
"""The 8-bit product, which changes results.

It computes all rows of a layer if it is faster, else none. So a token's numbers do not depend on the number of rows.
"""


def product_kinds(weight: Tensor, bias: Tensor | None, kernels: str) -> dict[str, MakeProduct]:
    """The kinds of product that work for this weight here, by name. The first is used without measurement.

    Args:
        weight: any weight of the model.
        bias: the weight's bias.
        kernels: ``torch`` excludes all other kinds.
    """
    makers: dict[str, MakeProduct] = {NATIVE: PackedLinear, "onednn": OnednnProduct, "torch": TorchProduct}
    if kernels == "torch" or weight.device.type != "cpu":
        return {"torch": TorchProduct}
    if weight.dtype == torch.bfloat16 and not _multiplies_pairs():
        makers[NATIVE] = makers.pop(NATIVE)  # fast for few rows only; last, so that it is not used unmeasured
    elif weight.dtype not in DTYPES:
        del makers[NATIVE]
    expected = TorchProduct(weight, bias)(torch.ones(2, weight.shape[1], dtype=weight.dtype)).float()
    found: dict[str, MakeProduct] = {}
    for name, make in makers.items():
        try:  # the operators are not public: they may be missing or compute something else
            product = make(weight, bias)(torch.ones(2, weight.shape[1], dtype=weight.dtype)).float()
        except (CompileError, RuntimeError, AttributeError) as error:
            logger.warning("linear layers do not use %s: %s", name, str(error).splitlines()[0])
            continue
        scale = float(expected.abs().max()) + 1e-6
        if float((product - expected).abs().max()) <= (1e-4 if weight.dtype == torch.float32 else 2e-2) * scale:
            found[name] = make
    return found


def _multiplies_pairs() -> bool:
    try:
        return multiplies_pairs()
    except CompileError:
        return False


def rows_by_kind(
    samples: Sequence[tuple[Tensor, Tensor | None]],
    kinds: Mapping[str, MakeProduct],
    clock: Clock,
    deadline_s: float,
    *,
    one_kind: bool = False,
) -> dict[int, str]:
    """Measured rows -> the best kind, ascending. The first entry also covers fewer rows, the last all above.

    Args:
        samples: weights of one shape, with their biases.
        kinds: the products to compare.
        clock: times them.
        deadline_s: no measurement starts later, except the minimum number.
        one_kind: use the same kind for all rows.
    """
    seconds: dict[int, dict[str, float]] = {}
    products = {name: [make(*sample) for sample in samples] for name, make in kinds.items()}
    for rows in MEASURED_ROWS:
        x = torch.ones(rows, samples[0][0].shape[1], dtype=samples[0][0].dtype)
        # Each layer's least time: one call is short compared with the time slices of a busy machine.
        least_s = {name: [math.inf] * len(samples) for name in products}
        for _ in range(_REPEATS):
            for name, each in products.items():
                for index, product in enumerate(each):
                    start_s = clock.now()
                    product(x)
                    least_s[name][index] = min(least_s[name][index], clock.now() - start_s)
        seconds[rows] = {name: sum(times) for name, times in least_s.items()}
        if clock.now() > deadline_s and len(seconds) >= _ALWAYS_MEASURED:
            break
    return choose(dict(sorted(seconds.items())), one_kind=one_kind)


def choose(seconds: Mapping[int, Mapping[str, float]], *, one_kind: bool = False) -> dict[int, str]:
    """The best kind over all rows. Few rows prefer the C product, and some rows use another kind that is clearly
    faster.

    The 8-bit kind is used for all rows if its total time is less than the sum of the others' best times, else for none.
    """
    names = next(iter(seconds.values()))
    if QUANTIZED in names:
        others = {rows: {name: times[name] for name in names if name != QUANTIZED} for rows, times in seconds.items()}
        least_s = sum(min(times.values()) for times in others.values())
        is_faster = sum(times[QUANTIZED] for times in seconds.values()) < least_s
        return {next(iter(seconds)): QUANTIZED} if is_faster else choose(others, one_kind=one_kind)
    overall = {name: sum(times[name] / min(times.values()) for times in seconds.values()) for name in names}
    best = min(overall, key=overall.__getitem__)
    if one_kind:
        return {next(iter(seconds)): best}
    chosen: dict[int, str] = {}
    for rows, times in seconds.items():
        is_few = NATIVE in times and 2 * rows <= FEW_ROWS
        usual, share = (NATIVE, _FAR_FASTER) if is_few else (best, _CLEARLY_FASTER)
        fastest = min(times, key=times.__getitem__)
        chosen[rows] = fastest if times[fastest] < share * times[usual] else usual
    return chosen

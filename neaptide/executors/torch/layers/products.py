"""How the product of a linear layer is computed on a CPU: chosen by measurement when the model is loaded.

Which is fastest depends on the processor, on the shape and on the rows: BLAS libraries pack the weight anew in every
call, which a few rows do not repay, and some CPUs have matrix instructions that only some of the libraries use.
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
"""In this order; each stands for up to twice as many. What is best at one row only would be many times slower at the
rows of a prompt."""
FEW_ROWS = 8
"""A step of nothing but products in C is one call. Of so few rows the calls are a large part, so they are computed in C
unless another kind is far faster."""
_ALWAYS_MEASURED = 2
"""So many of them, whatever the time: a busy machine takes many times as long."""
BUDGET_S = 0.8
"""For all shapes of a model, in equal shares; where one ends, rows are computed as the next that were measured."""
_REPEATS = 4
SAMPLE_BYTES = 32 << 20
"""Weights of one shape that take turns while it is measured: as in a step, none is still in a small cache."""
UNMEASURED_BYTES = 1 << 18
"""Smaller weights take the first kind: a measurement would be of the calls, not of the products."""
_CLEARLY_FASTER = 0.85
"""A second kind for some rows, and so a second copy of the weights, has to take less than this share of the time."""
_FAR_FASTER = 0.6
"""For a few rows another kind than that in C has to take less than this share of its time: that they are one call is
worth a quarter of a step, which no product by itself shows, and the noise of a start must not decide on it."""


TILE_ROWS = 512
"""More rows are computed as several products of so many: packing and reading the weight is then long repaid."""
_SMALL_WEIGHT_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, TILE_ROWS)
"""For which a product of a weight below ``UNMEASURED_BYTES`` is made: it takes hardly longer than the call."""
_ROUNDING = {64: 1, 128: 4, 256: 8, TILE_ROWS: 16}
"""Of the rows of larger weights, up to the key: 2% more on average above 64, and at most 6%."""


def rounded_up(rows: int, *, is_small: bool) -> int:
    """The rows of the product that computes so many, of a small weight or of another.

    For every shape of a product that it has seen oneDNN keeps code and memory (0.1 to 0.6 MB), also of shapes that its
    cache has let go. A step has any number of rows, so products are made for few.

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
"""By whether the weight is small. To be looked up: a step of a few decodes makes a product every 0.1 ms."""


def is_small(weight: Tensor) -> bool:
    """Too small for its products to be measured, or made for many numbers of rows."""
    return weight.numel() * weight.itemsize < UNMEASURED_BYTES


class TiledProduct:
    """A product of few shapes: rows in tiles, what is left of them behind zeros.

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
        # Put behind the rows by one copy: ``F.pad`` fills all of the result before it copies, twice the time.
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
        """Rows of zeros have no part in those of ``x``, and go nowhere."""
        rows = x.shape[0]
        more = self._rounded_up[rows] - rows
        return self._compute(torch.cat((x, self._zeros[:more])))[:rows] if more else self._compute(x)


class Product(Protocol):
    """``x W^T + b``."""

    is_noted: ClassVar[bool]
    """Whether all that it computes are calls that a ``Recording`` notes."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """``residual += x W^T + b`` in place."""
        ...


class TorchProduct:
    """As torch computes it from the weight as it is."""

    __slots__ = ("_tiled", "bias", "weight")

    is_noted: ClassVar[bool] = False

    _PADDED_ROWS = range(8, 16)
    """On a CPU (fp32, one thread) products of so many rows take up to 1.5 times as long as those of 16."""

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
        """The sum rides along in the matrix product, where that is not oneDNN's."""
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
    """oneDNN on a weight packed once, by the operators that torch's compiler uses when it freezes a model."""

    __slots__ = ()

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)

        def compute(x: Tensor) -> Tensor:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return product

        super().__init__(compute, weight)


MakeProduct = Callable[[Tensor, Tensor | None], Product]

NATIVE = "native"
"""The kind that is written in C."""
QUANTIZED = "w8a8"
"""The kind that computes something else: where it is faster it computes all rows of a layer, else none, so that a
token's numbers do not depend on how many others are computed beside it."""


def product_kinds(weight: Tensor, bias: Tensor | None, kernels: str) -> dict[str, MakeProduct]:
    """Those that compute such a weight here, by name; the first is the one to take unmeasured.

    Args:
        weight: any of the model.
        bias: its own.
        kernels: ``torch`` leaves all others out.
    """
    makers: dict[str, MakeProduct] = {NATIVE: PackedLinear, "onednn": OnednnProduct, "torch": TorchProduct}
    if kernels == "torch" or weight.device.type != "cpu":
        return {"torch": TorchProduct}
    if weight.dtype == torch.bfloat16 and not _multiplies_pairs():
        makers[NATIVE] = makers.pop(NATIVE)  # for few rows; last, because unmeasured it would compute many, too
    elif weight.dtype not in DTYPES:
        del makers[NATIVE]
    expected = TorchProduct(weight, bias)(torch.ones(2, weight.shape[1], dtype=weight.dtype)).float()
    found: dict[str, MakeProduct] = {}
    for name, make in makers.items():
        try:  # the operators are not public: they may be gone, or compute something else
            product = make(weight, bias)(torch.ones(2, weight.shape[1], dtype=weight.dtype)).float()
        except (CompileError, RuntimeError, AttributeError) as error:
            logger.warning("linear layers do without %s: %s", name, str(error).splitlines()[0])
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
    """Measured rows -> the kind that computes them best; ascending, the first for all below and the last for all above.

    Args:
        samples: weights of one shape, with their biases.
        kinds: of product.
        clock: that times them.
        deadline_s: no measurement begins later, but for those that are always made.
        one_kind: the same for all rows.
    """
    seconds: dict[int, dict[str, float]] = {}
    products = {name: [make(*sample) for sample in samples] for name, make in kinds.items()}
    for rows in MEASURED_ROWS:
        x = torch.ones(rows, samples[0][0].shape[1], dtype=samples[0][0].dtype)
        # The least time of each layer on its own: a call is short beside the turns in which a busy machine runs us.
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
    """The kind that does best over all rows, for a few that in C, and for some another that is clearly faster there.

    That of 8-bit numbers for all rows, if it takes less time for all measured rows together than the best of the others
    for each, and else for none.
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

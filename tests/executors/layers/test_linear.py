"""Linear layers give the same whatever the number of rows and whatever computes them; what does is chosen by time."""

import logging
import shutil

import pytest
import torch

from neaptide.engine.clock import MonotonicClock, VirtualClock
from neaptide.executors.torch.layers import linear, products
from neaptide.executors.torch.layers.linear import Linear, choose_products
from neaptide.executors.torch.layers.products import (
    NATIVE,
    TILE_ROWS,
    TiledProduct,
    TorchProduct,
    choose,
    product_kinds,
    rounded_up,
    rows_by_kind,
)
from neaptide.kernels import native

ROWS = (1, 7, 8, 11, 15, 16, 17)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, native.COMPILERS)), reason="there is no C compiler")


def make(bias: bool, outputs: int = 12, inputs: int = 20) -> tuple[Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(outputs, inputs, bias=bias, dtype=torch.float32, device=torch.device("cpu"))
    assert layer.weight is not None
    layer.weight.normal_(generator=generator)
    if layer.bias is not None:
        layer.bias.normal_(generator=generator)
    return layer, torch.randn(max(ROWS), inputs, generator=generator)


@pytest.mark.parametrize("kind", ["native", "onednn", "torch"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_row_does_not_depend_on_how_many_there_are(rows: int, bias: bool, kind: str) -> None:
    layer, x = make(bias)
    assert layer.weight is not None
    kinds = product_kinds(layer.weight, layer.bias, "auto")
    if kind not in kinds:
        pytest.skip(f"{kind} is not there")
    expected = x[:rows].double() @ layer.weight.double().t() + (0.0 if layer.bias is None else layer.bias.double())
    layer.use([], [kinds[kind](layer.weight, layer.bias)])
    torch.testing.assert_close(layer(x[:rows]).double(), expected, rtol=1e-5, atol=1e-5)
    residual = torch.ones(rows, 12)
    layer.add_to(residual, x[:rows])
    torch.testing.assert_close(residual.double(), 1.0 + expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("is_small", "num_shapes"), [(True, 15), (False, 112)])
def test_products_of_any_rows_are_made_for_few(is_small: bool, num_shapes: int) -> None:
    """oneDNN keeps memory for every number of rows it sees."""
    weight = torch.ones((2, 3) if is_small else (256, 256))
    seen: set[int] = set()

    def compute(x: torch.Tensor) -> torch.Tensor:
        seen.add(x.shape[0])
        return x[:, :1] + torch.zeros(weight.shape[0])

    product = TiledProduct(compute, weight)
    for rows in (*range(1, 514), 2048):
        x = torch.arange(rows).unsqueeze(1) + torch.zeros(weight.shape[1])
        sums = torch.ones(rows, weight.shape[0])
        product.add_to(sums, x)
        assert product(x).shape == sums.shape
        assert torch.equal(product(x)[:, 0], x[:, 0])
        assert torch.equal(sums[:, -1], 1 + x[:, 0])
    assert len(seen) == num_shapes


def test_few_rows_more_are_computed_where_they_cost() -> None:
    more = [rounded_up(rows, is_small=False) / rows - 1 for rows in range(1, TILE_ROWS + 1)]
    assert more[:64] == [0.0] * 64
    assert max(more) == pytest.approx(15 / 257)
    assert sum(more[64:]) / len(more[64:]) < 0.02


@pytest.mark.parametrize("kind", ["onednn", "torch"])
@pytest.mark.parametrize("rows", [1, 17, 255, 511, 513, 700])
def test_tiles_and_zeros_behind_change_no_bit(rows: int, kind: str) -> None:
    """Small whole numbers, whose sums are exact in bf16; and a row that is no number stays the only one."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-2, 3, (12, 20), generator=generator).bfloat16()
    bias = torch.randint(-2, 3, (12,), generator=generator).bfloat16()
    x = torch.randint(-2, 3, (rows, 20), generator=generator).bfloat16()
    expected = x.double() @ weight.double().t() + bias.double()
    kinds = product_kinds(weight, bias, "auto")
    if kind not in kinds:
        pytest.skip(f"{kind} is not there")
    product, bad = kinds[kind](weight, bias), rows // 2
    assert torch.equal(product(x).double(), expected)
    x[bad], expected[bad] = float("nan"), float("nan")
    sums = torch.ones(rows, 12).bfloat16()
    product.add_to(sums, x)
    torch.testing.assert_close(product(x).double(), expected, rtol=0.0, atol=0.0, equal_nan=True)
    torch.testing.assert_close(sums.double(), expected + 1, rtol=0.0, atol=0.0, equal_nan=True)


def test_the_kind_that_is_best_over_all_rows_is_taken() -> None:
    seconds = {1: {"a": 1.0, "b": 1.1}, 16: {"a": 2.0, "b": 1.0}, 256: {"a": 9.0, "b": 10.0}}
    assert choose(seconds) == {1: "b", 16: "b", 256: "b"}


def test_another_kind_has_to_be_clearly_faster() -> None:
    seconds = {1: {"a": 1.0, "b": 3.0}, 16: {"a": 1.0, "b": 2.0}, 256: {"a": 10.0, "b": 8.0}}
    assert choose(seconds) == {1: "a", 16: "a", 256: "b"}


def test_few_rows_are_computed_in_c_unless_another_kind_is_far_faster() -> None:
    """Elsewhere that in C has to be clearly faster itself."""
    seconds = {4: {NATIVE: 1.6, "a": 1.0}, 16: {NATIVE: 0.9, "a": 1.0}, 64: {NATIVE: 9.0, "a": 1.0}}
    assert choose(seconds) == {4: NATIVE, 16: "a", 64: "a"}
    assert choose(seconds | {4: {NATIVE: 1.7, "a": 1.0}}) == {4: "a", 16: "a", 64: "a"}


def test_one_kind_is_the_one_that_is_best_over_all_rows() -> None:
    seconds = {1: {"a": 1.0, "b": 3.0}, 16: {"a": 1.0, "b": 2.0}, 256: {"a": 10.0, "b": 1.0}}
    assert choose(seconds) == {1: "a", 16: "a", 256: "b"}
    assert choose(seconds, one_kind=True) == {1: "b"}


@needs_compiler
@pytest.mark.parametrize("in_pairs", [True, False])
def test_a_small_bfloat16_weight_is_computed_in_c_where_pairs_are_multiplied(
    in_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is measured: the first kind is taken."""
    monkeypatch.setattr(products, "multiplies_pairs", lambda: in_pairs)
    kinds = list(product_kinds(torch.ones(12, 20, dtype=torch.bfloat16), None, "auto"))
    assert kinds.index(NATIVE) == (0 if in_pairs else len(kinds) - 1)


def test_rows_go_to_the_product_chosen_for_them() -> None:
    layer, _ = make(bias=False)
    seen: list[str] = []

    class Recorded(TorchProduct):
        def __init__(self, name: str) -> None:
            super().__init__(torch.zeros(12, 20), None)
            self.name = name

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.name)
            return super().__call__(x)

    layer.use([2, 32], [Recorded("few"), Recorded("some"), Recorded("many")])
    for rows in (1, 2, 3, 32, 33, 500):
        layer(torch.zeros(rows, 20))
    assert seen == ["few", "few", "some", "some", "many", "many"]


def test_a_measurement_ends_in_time() -> None:
    """A clock on which every look takes a second: only the rows of a decode and of a small prompt are measured."""

    class Slow(VirtualClock):
        def now(self) -> float:
            self.sleep_until(super().now() + 1.0)
            return super().now()

    layer, _ = make(bias=False)
    assert layer.weight is not None
    kinds = product_kinds(layer.weight, None, "auto")
    assert list(rows_by_kind([(layer.weight, None)], kinds, Slow(), deadline_s=5.0)) == [4, 64]


@needs_compiler
def test_a_weight_that_nothing_reads_is_dropped() -> None:
    layer, x = make(bias=True)
    before = layer(x)
    choose_products([layer], "auto", MonotonicClock())
    assert layer.weight is None
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)


def test_a_second_copy_for_few_rows_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve outputs of twenty inputs, twice."""
    seen: list[bool] = []

    def rows_by_kind(*_: object, one_kind: bool) -> dict[int, str]:
        seen.append(one_kind)
        return {1: "torch"}

    monkeypatch.setattr(linear, "rows_by_kind", rows_by_kind)
    monkeypatch.setattr(products, "UNMEASURED_BYTES", 1)
    num_bytes = 2 * 12 * 20 * torch.float32.itemsize
    for free in (4 * num_bytes - 1, 4 * num_bytes):
        layers = [make(bias=False)[0] for _ in range(2)]
        monkeypatch.setattr(linear, "free_bytes", lambda _, free=free: free)
        choose_products([*layers], "auto", MonotonicClock())
    assert seen == [True, True, False, False]


def test_torch_can_be_insisted_on() -> None:
    layer, _ = make(bias=True)
    choose_products([layer], "torch", MonotonicClock())
    assert layer.weight is not None


def test_large_weights_are_measured(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "UNMEASURED_BYTES", 1)
    monkeypatch.setattr(products, "MEASURED_ROWS", (1, 4))
    layers = [make(bias=False)[0] for _ in range(3)]
    with caplog.at_level(logging.DEBUG):
        choose_products(layers, "auto", MonotonicClock())
    assert any(message.startswith("linear layers of 12 x 20: ") for message in caplog.messages)


def test_the_log_names_a_way_where_it_begins() -> None:
    assert linear._as_text({4: "a", 16: "a", 64: "b", 256: "a"}) == "a from 4 rows, b from 64 rows, a from 256 rows"


def test_without_a_compiler_the_others_remain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "COMPILERS", ())
    native.load_library.cache_clear()
    layer, _ = make(bias=False)
    assert layer.weight is not None
    assert "native" not in product_kinds(layer.weight, None, "auto")
    assert caplog.messages[0].startswith("linear layers do not use native: there is no C compiler")

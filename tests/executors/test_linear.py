"""Linear layers give the same whatever the number of rows: a CPU pads small numbers of them."""

import pytest
import torch

from neaptide.executors.torch.layers.linear import Linear

ROWS = (1, 7, 8, 11, 15, 16, 17)


def make(bias: bool) -> tuple[Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(12, 20, bias=bias, dtype=torch.float32, device=torch.device("cpu"))
    layer.weight.normal_(generator=generator)
    if layer.bias is not None:
        layer.bias.normal_(generator=generator)
    return layer, torch.randn(max(ROWS), 20, generator=generator)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_row_does_not_depend_on_how_many_there_are(rows: int, bias: bool) -> None:
    layer, x = make(bias)
    expected = x[:rows].double() @ layer.weight.double().t() + (0.0 if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(layer(x[:rows]).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_the_product_is_added_in_place(rows: int, bias: bool) -> None:
    layer, x = make(bias)
    residual = torch.ones(rows, 12)
    layer.add_to(residual, x[:rows])
    torch.testing.assert_close(residual, 1.0 + layer(x[:rows]), rtol=1e-5, atol=1e-5)

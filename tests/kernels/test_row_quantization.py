"""Rows as 8-bit numbers and back, in torch and in C."""

import shutil

import pytest
import torch
from torch import Tensor

from neaptide.kernels.native import COMPILERS
from neaptide.kernels.row_quantization import NativeRowQuantizer, Quantized, RowQuantizer, row_quantizer

KINDS = [RowQuantizer, *([NativeRowQuantizer] if any(map(shutil.which, COMPILERS)) else [])]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=KINDS)
def quantizer(request: pytest.FixtureRequest) -> RowQuantizer:
    made: RowQuantizer = request.param()
    return made


def values_of(quantized: Quantized, rows: int) -> Tensor:
    """[rows, size] float64."""
    numbers, scales, zeros = (each[:rows].double() for each in quantized)
    return (numbers - zeros.unsqueeze(1)) * scales.unsqueeze(1)


def of_ones(outputs: int) -> Tensor:
    return torch.arange(outputs, dtype=torch.float32) - 3.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 100, 576])
def test_each_number_is_within_half_a_step(quantizer: RowQuantizer, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn(7, size, generator=generator) * torch.logspace(-6, 6, 7).unsqueeze(1)).to(dtype)
    x[2], x[3] = x[2].abs(), -x[3].abs()
    found = quantizer.quantize(x, 9)
    assert found.numbers.shape == (9, size)
    low, high = x.double().amin(1).clamp_max(0), x.double().amax(1).clamp_min(0)
    torch.testing.assert_close(found.scales.double(), (high - low) / 255, rtol=1e-6, atol=0.0)
    assert torch.equal(found.zeros, found.zeros.round())
    assert found.zeros[2:4].tolist() == [0.0, 255.0]
    error = (values_of(found, 7) - x.double()).abs().amax(1)
    # Where both ends round away from zero, the farther one is cut off by up to a step's rounding of the zero.
    assert (error <= found.scales * 1.0001).all()
    assert ((values_of(found, 7) - x.double()).abs() <= found.scales.unsqueeze(1) * 0.5001).double().mean() > 0.97


def test_zero_stays_itself_and_so_does_a_row_of_zeros(quantizer: RowQuantizer) -> None:
    x = torch.tensor([[0.0, 3.7, -1.1], [0.0, 0.0, 0.0]])
    found = values_of(quantizer.quantize(x, 2), 2)
    assert found[0, 0] == 0.0
    assert found[1].tolist() == [0.0, 0.0, 0.0]


def test_small_whole_numbers_are_exact(quantizer: RowQuantizer) -> None:
    """A row from -128 to 127 has a step of one."""
    x = torch.arange(-128, 128, dtype=torch.float32).unsqueeze(0)
    found = quantizer.quantize(x, 1)
    assert found.numbers[0].tolist() == list(range(256))
    assert (found.scales.tolist(), found.zeros.tolist()) == ([1.0], [128.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_a_number_that_is_none_makes_none_and_stays_alone(
    quantizer: RowQuantizer, bad: float, dtype: torch.dtype
) -> None:
    x = torch.ones(3, 40, dtype=dtype)
    x[1, 33] = bad
    quantized = quantizer.quantize(x, 3)
    out = torch.empty(3, 5, dtype=dtype)
    quantizer.restore(torch.ones(3, 5), quantized, of_ones(5), None, out, adds=False)
    assert out.isnan().all(dim=1).tolist() == [False, True, False]
    assert out.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_sums_become_products(quantizer: RowQuantizer, biased: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = torch.randint(-999, 999, (6, 33), generator=generator).float()
    scales, zeros = torch.rand(4, generator=generator), torch.randint(0, 256, (4,), generator=generator).float()
    quantized = Quantized(torch.empty(6, 1, dtype=torch.uint8), scales, zeros)
    bias = torch.randn(33, generator=generator) if biased else None
    expected = scales.double().unsqueeze(1) * (sums[:4].double() - zeros.double().unsqueeze(1) * of_ones(33).double())
    expected += 0.0 if bias is None else bias.double()
    wide = torch.full((4, 40), 2.0, dtype=dtype)
    out, tolerance = wide[:, :33], 2**-8 * 1.01 if dtype == torch.bfloat16 else 1e-5
    for adds, before in ((False, 0.0), (True, None)):
        now = out.double().clone() if before is None else before
        quantizer.restore(sums.clone(), quantized, of_ones(33), bias, out, adds=adds)
        torch.testing.assert_close(out.double(), now + expected, rtol=tolerance, atol=1e-3)
    assert (wide[:, 33:] == 2.0).all()


@pytest.mark.skipif(len(KINDS) == 1, reason="there is no C compiler")
def test_threads_change_nothing(two_threads: None) -> None:
    native, x = NativeRowQuantizer(), torch.randn(300, 600)
    sums, outs = torch.randn(300, 600), [torch.empty(300, 600) for _ in range(2)]
    found = []
    for threads, out in zip((2, 1), outs, strict=True):
        torch.set_num_threads(threads)
        found.append(native.quantize(x, 300))
        native.restore(sums, found[-1], of_ones(600), None, out, adds=False)
    assert all(map(torch.equal, *found))
    assert torch.equal(*outs)


def test_what_c_does_not_take_is_left_to_torch() -> None:
    x, out = torch.randn(3, 8).half(), torch.empty(3, 5, dtype=torch.float16)
    found, same = row_quantizer().quantize(x, 3), RowQuantizer().quantize(x, 3)
    assert all(map(torch.equal, found, same))
    row_quantizer().restore(torch.ones(3, 5), found, of_ones(5), None, out, adds=False)
    assert out.dtype == torch.float16
    torch.testing.assert_close(
        out.double(),
        found.scales.double().unsqueeze(1) * (1 - found.zeros.double().outer(of_ones(5).double())),
        rtol=1e-3,
        atol=1e-3,
    )
    assert type(row_quantizer("torch")) is RowQuantizer

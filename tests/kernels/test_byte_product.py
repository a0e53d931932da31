"""Products of 8-bit numbers in C against whole numbers, and what they promise beside being right."""

import ctypes
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neaptide.kernels.native import COMPILERS
from neaptide.kernels.recording import CallRecording
from neaptide.kernels.row_quantization import DTYPES, ByteProduct
from tests.kernels.quantized_rows import quantize_rows

HAS_COMPILER = any(map(shutil.which, COMPILERS))
pytestmark = pytest.mark.skipif(
    not HAS_COMPILER or not ByteProduct.takes(torch.float32, 64), reason="nothing multiplies bytes here"
)


class NoJob(ctypes.Structure):
    """Of a step without attention."""


def weights(outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales of very different sizes, a bias."""
    generator = torch.Generator().manual_seed(outputs * inputs)
    numbers = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    return numbers, torch.logspace(-3, 0, outputs), torch.randn(outputs, generator=generator)


def rows_of(rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, inputs, generator=generator) * torch.logspace(-2, 2, rows).unsqueeze(1)).to(dtype)


def whole_product(x: Tensor, numbers: Tensor) -> Tensor:
    """[rows, outputs] of x, whole numbers."""
    return x.to(torch.int64) @ numbers.to(torch.int64).t()


@settings(max_examples=60)
@given(st.integers(1, 70), st.integers(1, 100), st.integers(1, 520), st.booleans(), st.sampled_from(DTYPES))
def test_every_sum_is_exact(rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    """Rows from -127 to 128 have steps of one: nothing but the sums is computed, below 2^24 without any rounding."""
    numbers, _, _ = weights(outputs, inputs)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-127, 129, (rows, inputs), generator=generator)
    x[:, 0], x[:, -1] = -127, 128
    if inputs == 1:
        x[:] = 255  # alone it is the whole range
    bias = torch.arange(outputs) - 7.0
    product = ByteProduct(numbers, torch.ones(outputs), bias if biased else None)
    expected = whole_product(x, numbers).float() + (bias if biased else 0.0)
    assert torch.equal(product(x.to(dtype)), expected.to(dtype))
    residual = torch.full((rows, outputs), 3.0, dtype=dtype)
    product.add_to(residual, x.to(dtype))
    assert torch.equal(residual, (expected + 3.0).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [*range(1, 15), 97])
def test_scales_and_zeros_are_those_of_the_rows(rows: int, dtype: torch.dtype) -> None:
    numbers, scales, bias = weights(70, 303)
    x = rows_of(rows, 350, dtype)[:, :303]
    quantized = quantize_rows(x)
    whole = whole_product(quantized.numbers - quantized.zeros.unsqueeze(1), numbers)
    expected = whole.double() * scales.double() * quantized.scales.double().unsqueeze(1) + bias.double()
    found = ByteProduct(numbers, scales, bias)(x)
    rtol = 2**-8 * 1.01 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("inputs", [64, 4099, 65536])
def test_the_largest_sums_do_not_overflow(inputs: int, sign: int) -> None:
    product = ByteProduct(torch.full((33, inputs), sign * 127, dtype=torch.int8), torch.ones(33), None)
    x = torch.full((15, inputs), 255.0)
    x[1::2] = -255.0  # numbers of zero, whose zero is 255
    expected = torch.tensor([255.0, -255.0]).repeat(8)[:15].unsqueeze(1) * sign * 127 * inputs
    assert torch.equal(product(x), expected.float().expand(15, 33))


def test_more_inputs_than_that_are_left_to_others() -> None:
    assert not ByteProduct.takes(torch.float32, 65537)
    assert not ByteProduct.takes(torch.float16, 64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_a_number_that_is_none_stays_alone(bad: float) -> None:
    product, x = ByteProduct(*weights(33, 66)), rows_of(20, 66)
    expected = product(x)
    x[4, 65] = bad
    found = product(x)
    assert found[4].isnan().all()
    others = [row for row in range(20) if row != 4]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_whatever_is_beside_it_and_whatever_threads(
    dtype: torch.dtype, two_threads: None
) -> None:
    product, x = ByteProduct(*weights(170, 600)), rows_of(130, 600, dtype)
    whole = product(x)
    for rows in (*range(1, 16), 28, 97):
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])
    torch.set_num_threads(1)
    assert torch.equal(product(x), whole)


def test_other_tensors_are_refused() -> None:
    product = ByteProduct(*weights(20, 30))
    for x in (torch.randn(5, 31), torch.randn(5, 30).double(), torch.randn(30, 5).t(), torch.randn(1, 5, 30)):
        with pytest.raises(ValueError, match="do not match the weight's input"):
            product(x)
    for residual in (torch.zeros(4, 20), torch.zeros(5, 21), torch.zeros(20, 5).t(), torch.zeros(5, 20).bfloat16()):
        with pytest.raises(ValueError, match="not the weight's output"):
            product.add_to(residual, torch.randn(5, 30))


def test_a_recording_repeats_it_on_other_rows() -> None:
    up, down = ByteProduct(*weights(70, 40)), ByteProduct(*weights(40, 70))
    recording, memory = CallRecording(30), torch.zeros(30, 40).bfloat16()
    with recording.noting():
        down.add_to(memory[:2], up(memory[:2]))
    assert len(recording) == 2
    for rows in (1, 30, 17):
        expected = rows_of(rows, 40)
        memory[:rows] = expected
        down.add_to(expected, up(expected))
        recording.replay(NoJob(), rows)
        assert torch.equal(memory[:rows], expected)

"""The C linear layer against float64, and what it promises beside being right."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neaptide.kernels.linear import PackedLinear, multiplies_pairs
from neaptide.kernels.native import COMPILERS

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")


def weights(out_features: int, in_features: int, *, bfloat16: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    return (weight.bfloat16().float() if bfloat16 else weight), torch.randn(out_features, generator=generator)


@settings(max_examples=40)
@given(
    st.sampled_from([1, 2, 5, 6, 7, 12, 13, 18, 19, 31, 96, 97, 257]),
    st.sampled_from([1, 15, 16, 17, 48, 100]),
    st.sampled_from([1, 3, 64, 255, 257, 520, 1601]),
    st.booleans(),
    st.booleans(),
)
def test_against_float64(rows: int, outputs: int, inputs: int, bfloat16: bool, biased: bool) -> None:
    weight, bias = weights(outputs, inputs, bfloat16=bfloat16)
    x = torch.randn(rows, inputs)
    packed = PackedLinear(weight, bias if biased else None)
    expected = x.double() @ weight.double().t() + (bias.double() if biased else 0.0)
    torch.testing.assert_close(packed(x).double(), expected, rtol=1e-5, atol=2e-4)
    residual = torch.ones(rows, outputs)
    packed.add_to(residual, x)
    torch.testing.assert_close(residual.double(), 1.0 + expected, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_row_is_the_same_bits_however_many_there_are(bfloat16: bool) -> None:
    """Few rows widen a weight each for itself, many share a copy of a piece of the inputs, 256 and more go in turns."""
    weight, bias = weights(70, 1601, bfloat16=bfloat16)
    packed, x = PackedLinear(weight, bias), torch.randn(300, 1601)
    whole, sums = packed(x), torch.randn(300, 70)
    added = sums.clone()
    packed.add_to(added, x)
    for rows in (1, 2, 5, 6, 7, 12, 13, 18, 19, 64, 97, 256, 257):
        assert torch.equal(packed(x[:rows]), whole[:rows])
        some = sums[:rows].clone()
        packed.add_to(some, x[:rows])
        assert torch.equal(some, added[:rows])


def test_bfloat16_numbers_take_half_the_memory_and_are_exact() -> None:
    weight, _ = weights(64, 600, bfloat16=True)  # whole panels on any CPU
    halves, x = PackedLinear(weight, None), torch.randn(20, 600)
    assert halves.num_bytes == weight.numel() * 2
    nearly = weight.clone()
    nearly[-1, -1] += 1e-4  # one number that is none of bf16
    wholes = PackedLinear(nearly, None)
    assert wholes.num_bytes == weight.numel() * 4
    assert torch.equal(halves(x)[:, :-1], wholes(x)[:, :-1])


def test_threads_change_nothing(two_threads: None) -> None:
    weight, bias = weights(300, 600, bfloat16=True)
    packed, x = PackedLinear(weight, bias), torch.randn(40, 600)
    two = packed(x)
    torch.set_num_threads(1)
    assert torch.equal(two, packed(x))


def test_rows_with_gaps_between_them() -> None:
    weight, bias = weights(20, 30, bfloat16=False)
    wide = torch.randn(5, 50)
    packed = PackedLinear(weight, bias)
    assert torch.equal(packed(wide[:, :30]), packed(wide[:, :30].contiguous()))


def test_other_tensors_are_refused() -> None:
    packed = PackedLinear(*weights(20, 30, bfloat16=False))
    for x in (torch.randn(5, 31), torch.randn(5, 30).double(), torch.randn(30, 5).t(), torch.randn(30)):
        with pytest.raises(ValueError, match="do not match the weight's input"):
            packed(x)
    for residual in (torch.zeros(4, 20), torch.zeros(5, 21), torch.zeros(20, 5).t()):
        with pytest.raises(ValueError, match="not the weight's output"):
            packed.add_to(residual, torch.randn(5, 30))


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_rows_of_bf16_are_rounded_once(rows: int) -> None:
    """Half of the last place, and a little for the order in which fp32 adds."""
    weight, bias = (each.bfloat16() for each in weights(100, 300, bfloat16=True))
    packed, x = PackedLinear(weight, bias), torch.randn(rows, 350).bfloat16()[:, :300]
    expected = x.double() @ weight.double().t() + bias.double()
    found = packed(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-8 * 1.01, atol=2e-4)
    residual = torch.randn(rows, 100).bfloat16()
    expected += residual.double()
    packed.add_to(residual, x)
    torch.testing.assert_close(residual.double(), expected, rtol=2**-8 * 1.01, atol=2e-4)


@settings(max_examples=40)
@given(
    st.sampled_from([1, 2, 7, 13, 14, 15, 16, 17, 28, 29, 32, 33, 120, 200]),
    st.sampled_from([1, 15, 16, 31, 32, 33, 100]),
    st.sampled_from([1, 2, 6, 8, 32, 96, 254, 256, 301, 520]),
    st.booleans(),
)
def test_bf16_against_float64(rows: int, outputs: int, inputs: int, biased: bool) -> None:
    """Small whole numbers, of which every sum is exact: any number that is left out, or counted twice, shows."""
    generator = torch.Generator().manual_seed(rows * outputs + inputs)

    def small(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).bfloat16()

    weight, bias, x, residual = small(outputs, inputs), small(outputs), small(rows, inputs), small(rows, outputs)
    packed = PackedLinear(weight, bias if biased else None)
    expected = x.float() @ weight.float().t() + (bias.float() if biased else 0.0)
    assert torch.equal(packed(x), expected.bfloat16())
    expected += residual.float()
    packed.add_to(residual, x)
    assert torch.equal(residual, expected.bfloat16())


@pytest.mark.parametrize("inputs", [600, 608])
def test_a_row_of_bf16_is_the_same_bits_however_many_there_are(two_threads: None, inputs: int) -> None:
    """608 inputs are whole tiles, where a processor multiplies those."""
    weight, bias = (each.bfloat16() for each in weights(70, inputs, bfloat16=True))
    packed, x = PackedLinear(weight, bias), torch.randn(130, inputs).bfloat16()
    whole = packed(x)
    for rows in (1, 2, 13, 14, 15, 16, 17, 28, 33, 97):
        assert torch.equal(packed(x[:rows]), whole[:rows])
    torch.set_num_threads(1)
    assert torch.equal(packed(x), whole)


def test_a_row_of_bf16_that_is_no_number_stays_the_only_one() -> None:
    packed, x = PackedLinear(torch.ones(33, 64).bfloat16(), None), torch.ones(20, 64).bfloat16()
    x[4, 3], x[9, 5] = float("nan"), float("inf")
    found = packed(x)
    assert found[4].isnan().all()
    assert found[9].isinf().all()
    assert torch.equal(found[[0, 19]], torch.full((2, 33), 64.0).bfloat16())


def test_a_bf16_weight_that_is_multiplied_in_pairs_takes_bf16_alone() -> None:
    packed = PackedLinear(torch.ones(20, 30).bfloat16(), None)
    if multiplies_pairs():
        with pytest.raises(ValueError, match="do not match the weight's input"):
            packed(torch.ones(2, 30))
    else:
        assert torch.equal(packed(torch.ones(2, 30)), torch.full((2, 20), 30.0))

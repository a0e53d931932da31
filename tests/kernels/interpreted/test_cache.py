"""Writes to the cache and copies of slots by Triton's kernels, interpreted, against torch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from neaptide.kernels.kv_copy import launch, reference
from neaptide.kernels.kv_write.launch import write
from neaptide.kernels.kv_write.reference import WritePlaces, slots_of
from neaptide.kernels.kv_write.reference import write as write_by_torch
from neaptide.kernels.layer_ops import TorchLayerOps
from neaptide.kernels.layer_ops.fused import FusedLayerOps
from tests.kernels.cases import tree_with_chunks
from tests.kernels.interpreted.steps import planned

SIZE = 4
# Blocks 5, 3 back to front and 0; 2, 3 and 6 back to front.
PLACES = WritePlaces(
    torch.tensor([[10, 7, 0], [4, 6, 13]], dtype=torch.int32),
    torch.tensor([0, 0, 0, 3, 3], dtype=torch.int32),
    torch.tensor([1, 5, 8, 6, 12], dtype=torch.int32),
)
SLOTS = [5 * SIZE, 3 * SIZE + 3, 3 * SIZE, 3 * SIZE + 1, 6 * SIZE]


def step(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of five tokens, as part of wider rows; their rotation; a cache."""
    torch.manual_seed(0)
    fused = torch.randn(5, heads + 2 * kv_heads + 1, dim).to(dtype)
    angles = torch.randn(5, 1, dim // 2)
    cache = torch.full((7, SIZE, 2 * kv_heads, dim), -1.0, dtype=dtype)
    return fused[:, 1:], torch.polar(torch.ones_like(angles), angles), cache


def test_slots_by_table_and_direction() -> None:
    assert slots_of(PLACES, SIZE).tolist() == SLOTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (1, 1, 2), (3, 3, 10)])
def test_rotated_and_written(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    found, rotation, cache = step(heads, kv_heads, dim, dtype)
    expected, _, expected_cache = step(heads, kv_heads, dim, dtype)
    queries = expected.clone()
    write(found, rotation, cache, PLACES)
    write_by_torch(expected, rotation, expected_cache, PLACES)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(cache, expected_cache, **tolerance)
    assert not torch.equal(found[:, :heads], queries[:, :heads])
    others = [slot for slot in range(7 * SIZE) if slot not in SLOTS]
    assert (cache.flatten(0, 1)[others] == -1.0).all()


def test_written_as_it_stands() -> None:
    found, _, cache = step(0, 2, 6, torch.bfloat16)
    before = found.clone()
    write(found, None, cache, PLACES)
    assert torch.equal(found, before)
    assert torch.equal(cache.flatten(0, 1)[SLOTS], before)


def test_what_does_not_fit_is_not_written() -> None:
    heads, rotation, cache = step(6, 2, 16, torch.float32)
    for wrong in (heads[:3], heads[:, :3], heads[..., :10], heads.double()):
        with pytest.raises(ValueError, match=r"heads of shape|places of"):
            write(wrong, None, cache, PLACES)
    with pytest.raises(ValueError, match="a rotation of shape"):
        write(heads, rotation[:3], cache, PLACES)
    assert (cache == -1.0).all()


def test_layers_store_by_the_kernel_what_it_has_planned() -> None:
    """The plan's slots are those that the kernel writes to; heads are rotated as torch rotates them."""
    case = tree_with_chunks()
    are_reversed = np.zeros(case.tables.shape, bool)
    are_reversed[5:] = True
    plan = planned(case, are_reversed)
    torch.manual_seed(1)
    qkv = torch.randn(len(case.query), 6 + 4, 16)
    angles = torch.randn(len(qkv), 1, 8)
    rotation, same = torch.polar(torch.ones_like(angles), angles), qkv.clone()
    expected_cache = case.cache.clone()
    TorchLayerOps().rotate_and_store(same, rotation, expected_cache, plan)
    FusedLayerOps().rotate_and_store(qkv, rotation, case.cache, plan)
    torch.testing.assert_close(qkv, same, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(case.cache, expected_cache, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_of_all_layers_and_back(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache = torch.randn(3, 5, SIZE, 2, 6).to(dtype)
    every_slot, before, slots = cache.flatten(1, 2), cache.clone(), torch.tensor([7, 0, 19, 8])
    copied = launch.gather(every_slot, slots)
    assert torch.equal(copied, reference.gather(every_slot, slots))
    assert torch.equal(copied[2, 1], cache[1, 4, 3])
    cache.zero_()
    to = torch.tensor([3, 4, 0, 12])
    launch.scatter(every_slot, to, copied)
    expected = torch.zeros_like(before)
    reference.scatter(expected.flatten(1, 2), to, copied)
    assert torch.equal(cache, expected)
    assert torch.equal(cache[:, 0, 3], before[:, 1, 3])


def test_no_slots_are_copied_without_a_launch() -> None:
    cache, none = torch.ones(2, 4, 2, 6), torch.zeros(0, dtype=torch.int64)
    assert launch.gather(cache, none).shape == (0, 2, 2, 6)
    launch.scatter(cache, none, launch.gather(cache, none))
    assert (cache == 1).all()


def test_copies_that_do_not_fit_are_refused() -> None:
    cache, slots = torch.zeros(2, 4, 2, 6), torch.tensor([1])
    for wrong in (torch.zeros(2, 2, 2, 6), torch.zeros(1, 3, 2, 6), torch.zeros(1, 2, 2, 6).double()):
        with pytest.raises(ValueError, match="copies of shape"):
            launch.scatter(cache, slots, wrong)
    with pytest.raises(ValueError, match="contiguous"):
        launch.gather(cache.transpose(2, 3), slots)

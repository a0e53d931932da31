"""Recorded calls of kernels in C: repeated on what memory holds by then, and safe beside what torch computes."""

import shutil

import numpy as np
import pytest
import torch
from torch import Tensor

from neaptide.kernels.layer_ops import NativeLayerOps
from neaptide.kernels.linear import PackedLinear
from neaptide.kernels.native import COMPILERS
from neaptide.kernels.paged_attention import StepTables
from neaptide.kernels.paged_attention.native import NativeAttention, NativePlan
from neaptide.kernels.recording import CallRecording

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")

DTYPES = (torch.float32, torch.bfloat16)


class Feed:
    """A norm, a gated product and the sum: three kernels, two of them twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ops, self.weight = NativeLayerOps(), torch.randn(40, generator=generator).to(dtype)
        up, down = torch.randn(60, 40, generator=generator), torch.randn(40, 30, generator=generator)
        self.up, self.down = PackedLinear(up.to(dtype), None), PackedLinear(down.to(dtype), None)

    def __call__(self, x: Tensor) -> None:
        self.down.add_to(x, self.ops.silu_multiply(self.up(self.ops.rms_norm(x, self.weight, 1e-5))))


def attention(dtype: torch.dtype) -> NativeAttention:
    return NativeAttention(4, 2, 16, dtype, 8)


def plan(kernel: NativeAttention, context: int) -> NativePlan:
    """Of one decode whose blocks are 1, 2, ..."""
    tables = StepTables.of(np.arange(1, 1 + -(-context // 8))[None])
    return kernel.plan(np.array([1]), np.array([context]), tables)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_on_other_numbers_and_again(dtype: torch.dtype) -> None:
    """Of as many rows and of others. Sums in bf16 are made beside their place: a call that is repeated still adds."""
    feed, recording = Feed(dtype), CallRecording(4)
    generator = torch.Generator().manual_seed(1)
    first, *others = (torch.randn(rows, 40, generator=generator).to(dtype) for rows in (2, 2, 4, 1, 3))
    memory = torch.zeros(4, 40, dtype=dtype)
    x = memory[:2]
    x.copy_(first)
    with recording.noting():
        for _ in range(2):
            recording.begin_layer()
            feed(x)
    assert len(recording) == 8
    job = plan(attention(dtype), 1).job_for(torch.zeros(2, 8, 4, 16, dtype=dtype))
    for other in (*others, first):
        expected = other.clone()
        feed(expected)
        feed(expected)
        memory[: len(other)] = other
        recording.replay(job, len(other))
        assert torch.equal(memory[: len(other)], expected)


def test_calls_end_before_the_next_one_when_more_has_been_sent_than_taken() -> None:
    """The counts stand where the first of two turns writes: before it there is nothing to see, behind it there is."""
    feed, recording = Feed(torch.float32), CallRecording(1)
    job = plan(attention(torch.float32), 1).job_for(torch.zeros(2, 8, 4, 16))
    first = torch.randn(1, 40, generator=torch.Generator().manual_seed(4))
    once, twice, x = first.clone(), first.clone(), first.clone()
    feed(once)
    feed(twice)
    feed(twice)
    with recording.noting():
        for _ in range(2):
            recording.begin_layer()
            feed(x)

    def rings(row: Tensor) -> list[bool]:
        """By pair of counts that the row's bits make, whether there is more sent than taken."""
        counts = row.view(torch.int64).view(-1, 2)
        return (counts[:, 0] > counts[:, 1]).tolist()

    number = list(zip(rings(first), rings(once), strict=True)).index((False, True))

    def replayed(start: Tensor, looking_share: float) -> bool:
        x.copy_(start)
        return recording.replay(job, 1, x.data_ptr() + 16 * number, looking_share)

    assert not replayed(first, 1.0)
    assert torch.equal(x, once)
    assert not replayed(first, 0.625)  # five of eight calls
    assert torch.equal(x, once)
    assert replayed(first, 0.5)
    assert torch.equal(x, twice)
    assert not replayed(once, 0.125)
    assert torch.equal(x, once)
    assert replayed(once, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_planned_anew_for_each_step(dtype: torch.dtype) -> None:
    """Two layers, whose queries and caches are their own; contexts of other lengths in other blocks."""
    kernel, recording = attention(dtype), CallRecording(4)
    generator = torch.Generator().manual_seed(2)
    queries, caches = (torch.randn(2, *shape, generator=generator).to(dtype) for shape in ((1, 4, 16), (9, 8, 4, 16)))
    with recording.noting():
        step = plan(kernel, 5)
        outs = [step.attend(query, query, cache) for query, cache in zip(queries, caches, strict=True)]
    for context in (9, 1, 60):
        step = plan(kernel, context)
        other = plan(kernel, context)
        expected = [other.attend(query, query, cache) for query, cache in zip(queries, caches, strict=True)]
        recording.replay(step.job_for(caches[0]), 1)
        assert all(map(torch.equal, outs, expected))


def test_a_plan_for_another_cache_is_refused() -> None:
    step = plan(attention(torch.float32), 20)
    with pytest.raises(ValueError, match=r"block ids \(1, 3\) in a cache of 3"):
        step.job_for(torch.zeros(3, 8, 4, 16))
    with pytest.raises(ValueError, match="bfloat16 does not match the plan"):
        step.job_for(torch.zeros(9, 8, 4, 16, dtype=torch.bfloat16))


def test_what_torch_computes_in_between_stays_as_it_was() -> None:
    """It is not repeated; that it is still there keeps a call from writing to memory that is somebody else's."""
    feed, recording = Feed(torch.float32), CallRecording(4)
    first = torch.randn(1, 40, generator=torch.Generator().manual_seed(3))
    with recording.noting():
        doubled = 2 * first
        feed(doubled)
    address = doubled.data_ptr()
    del doubled
    taken = [torch.full((1, 40), 7.0) for _ in range(50)]
    assert address not in [each.data_ptr() for each in taken]
    recording.replay(plan(attention(torch.float32), 1).job_for(torch.zeros(2, 8, 4, 16)), 1)
    assert all(bool((each == 7.0).all()) for each in taken)


def test_more_rows_than_there_is_memory_for_are_refused() -> None:
    recording, job = CallRecording(4), plan(attention(torch.float32), 1).job_for(torch.zeros(2, 8, 4, 16))
    for rows in (0, 5):
        with pytest.raises(ValueError, match=f"{rows} rows of 4"):
            recording.replay(job, rows)


def test_nothing_is_noted_outside() -> None:
    feed, recording = Feed(torch.float32), CallRecording(4)
    x = torch.ones(1, 40)
    with recording.noting():
        feed(x)
    feed(x)
    with pytest.raises(ZeroDivisionError), recording.noting():
        raise ZeroDivisionError
    feed(x)
    assert len(recording) == 4

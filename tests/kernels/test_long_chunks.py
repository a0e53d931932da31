"""Long chunks of prompts: which of them torch computes, and that a step with them is right."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from neaptide.kernels.choice import choose_kernels
from neaptide.kernels.paged_attention import AttentionPlanner, Shape, StepTables, long_chunks, write_kv
from neaptide.kernels.paged_attention.long_chunks import MEASURED, ChunkShape, TorchChunks, choose, measured_choice
from neaptide.kernels.paged_attention.native import NativeAttention
from neaptide.kernels.paged_attention.tables import IntArray
from tests.kernels.cases import CPU, TOLERANCES, Case, share
from tests.kernels.test_native_attention import BLOCK, needs_compiler

WIDE = Shape(num_heads=8, num_kv_heads=4, head_dim=64, block_size=16)
BY_TORCH = TorchChunks({ChunkShape(64, 0): True})


def rows(chunks: TorchChunks, *lens: tuple[int, int]) -> list[int]:
    """``lens``: tokens and context of each request."""
    tokens, context = np.array(lens).T
    return chunks.takes(tokens, tokens + context)


@pytest.mark.parametrize(
    ("tokens", "context", "is_for_torch"),
    [
        (63, 4096, False),  # no measured shape is as small
        (64, 1023, False),
        (64, 1024, True),
        (300, 500, False),  # as 256 behind nothing
        (256, 1024, True),
        (2048, 8192, False),
    ],
)
def test_a_chunk_is_computed_as_the_largest_measured_one_that_it_contains(
    tokens: int, context: int, is_for_torch: bool
) -> None:
    measured = {(256, 1024): True, (64, 1024): True, (256, 0): False, (256, 8192): False}
    chunks = TorchChunks({ChunkShape(*shape): is_torch for shape, is_torch in measured.items()})
    assert rows(chunks, (1, 50), (tokens, context), (1, 5000)) == ([1] if is_for_torch else [])


def test_a_shape_that_was_not_measured_is_computed_as_the_next_smaller_one() -> None:
    chunks = TorchChunks({ChunkShape(256, 1024): True, ChunkShape(256, 0): False})
    assert rows(chunks, (256, 9000), (255, 9000), (256, 8)) == [0]


def test_torch_must_be_clearly_faster() -> None:
    found = choose({ChunkShape(256, 1024): (1.0, 0.89), ChunkShape(64, 1024): (1.0, 0.91)})
    assert found.choice == {ChunkShape(256, 1024): True, ChunkShape(64, 1024): False}


class Kernel:
    """A kernel of known results whose time is known, too: it moves the clock."""

    def __init__(self, seconds: Callable[[ChunkShape], float], result: float = 1.0) -> None:
        self.seconds, self.result, self.now_s = seconds, result, 0.0
        self.shapes: list[ChunkShape] = []

    def plan(self, query_lens: IntArray, seq_lens: IntArray, tables: StepTables) -> "Kernel":
        self.shapes.append(ChunkShape(int(query_lens[0]), int(seq_lens[0] - query_lens[0])))
        return self

    @property
    def slots(self) -> Tensor:
        raise AssertionError("nothing is written")

    def attend(self, query: Tensor, key_value: Tensor, kv_cache: Tensor) -> Tensor:
        self.now_s += self.seconds(self.shapes[-1])
        return torch.full_like(query, self.result)


def choice_of(monkeypatch: pytest.MonkeyPatch, in_c: Kernel, by_torch: Kernel, model: Shape = WIDE) -> TorchChunks:
    def plan(query_lens: IntArray, seq_lens: IntArray, tables: StepTables, block_size: int, **_: object) -> Kernel:
        return by_torch.plan(query_lens, seq_lens, tables)

    monkeypatch.setattr(long_chunks, "plan_attention", plan)
    return measured_choice(model, torch.float32, lambda few: in_c.plan, lambda: in_c.now_s + by_torch.now_s)


def test_what_is_slower_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C kernel is slow behind a context, torch without one."""
    in_c = Kernel(lambda shape: 3e-3 if shape.context else 1e-3)
    by_torch = Kernel(lambda shape: 1e-3 if shape.context else 3e-3)
    found = choice_of(monkeypatch, in_c, by_torch)
    assert found.choice == {shape: shape.context > 0 for shape in MEASURED}


def test_torch_is_used_for_nothing_if_it_gives_other_results(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = choice_of(monkeypatch, Kernel(lambda shape: 1.0), Kernel(lambda shape: 1e-6, result=1.01))
    assert found.choice == {}
    assert "other results" in caplog.text


def test_no_measurement_begins_that_would_end_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 us for each pair of a query and a key: the first shape takes 2.4 s for both kernels."""
    in_c, by_torch = (Kernel(lambda shape: 1e-6 * shape.pairs) for _ in range(2))
    assert list(choice_of(monkeypatch, in_c, by_torch).choice) == [MEASURED[0]]


def test_narrow_attention_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    in_c = Kernel(lambda shape: 1.0)
    assert choice_of(monkeypatch, in_c, Kernel(lambda shape: 0.1), Shape(4, 2, 16, 16)).choice == {}
    assert in_c.shapes == []


@needs_compiler
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_only_auto_measures(kernels: str) -> None:
    def now_s() -> float:
        raise AssertionError("the clock was read")

    choose_kernels(WIDE, dtype=torch.float32, device=CPU, cpu_kernels=kernels, now_s=now_s)


@needs_compiler
def test_auto_measures_with_the_given_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_chunks, "MEASURED", (ChunkShape(64, 16),))
    times = iter(range(100))
    choose_kernels(WIDE, dtype=torch.float32, device=CPU, now_s=lambda: float(next(times)))
    assert next(times) > 10


# ---- a step with chunks that torch computes ----


def mixed(dtype: torch.dtype = torch.float32) -> Case:
    """Decodes that share a prefix around three long chunks: in one piece, in two, and without context."""
    case = Case([(1, 100), (64, 70), (1, 130), (300, 33), (9, 20), (80, 0), (1, 40)], dtype=dtype)
    share(case, 2, 0, 6)
    return case


def by_torch(case: Case) -> AttentionPlanner:
    heads, dim = case.query.shape[1:]
    kernel = NativeAttention(heads, case.kv_heads, dim, case.dtype, BLOCK)
    kernel.torch_chunks = BY_TORCH
    return kernel.plan


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_step_against_float64(dtype: torch.dtype) -> None:
    case = mixed(dtype)
    plan = by_torch(case)(case.query_lens, case.seq_lens, case.step_tables())
    write_kv(case.cache, case.new, plan)
    found = plan.attend(case.query, torch.full_like(case.new, torch.nan), case.cache)  # read from the cache
    torch.testing.assert_close(found.double(), case.expected(), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@needs_compiler
def test_a_step_of_one_long_chunk_alone() -> None:
    case = Case([(100, 50)])
    plan = by_torch(case)(case.query_lens, case.seq_lens, case.step_tables())
    write_kv(case.cache, case.new, plan)
    found = plan.attend(case.query, case.new, case.cache)
    torch.testing.assert_close(found.double(), case.expected(), atol=1e-5, rtol=1e-5)


@needs_compiler
def test_reversed_blocks_of_a_long_chunk() -> None:
    plain, turned = mixed(), mixed()
    turned.cache = turned.cache.flip(1)
    results = []
    for case, are_reversed in ((plain, False), (turned, True)):
        tables = case.step_tables(np.full(case.tables.shape, are_reversed))
        plan = by_torch(case)(case.query_lens, case.seq_lens, tables)
        write_kv(case.cache, case.new, plan)
        results.append(plan.attend(case.query, case.new, case.cache))
    assert torch.equal(*results)


def test_a_longer_chunk_is_cut_into_equal_pieces() -> None:
    case = Case([(1, 4), (600, 10)])
    found = long_chunks.pieces(1, case.query_lens, case.seq_lens, case.step_tables(), BLOCK, torch.float32)
    assert [(chunk.start, chunk.stop, chunk.seq_len) for chunk in found] == [
        (1, 201, 210),
        (201, 401, 410),
        (401, 601, 610),
    ]

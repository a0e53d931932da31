"""The trial at start: what passes it, and what a server is told that does not."""

import pytest
import torch

from neaptide.kernels.paged_attention import attention_planner
from neaptide.kernels.prefix_attention import attention
from neaptide.kernels.prefix_attention.attention import PrefixAttention
from neaptide.kernels.prefix_attention.trial import try_attention
from tests.kernels.cases import CPU


class Kernel:
    """Takes the place of a kernel: ``kernel[grid](...)``."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def __getitem__(self, grid: tuple[int]) -> "Kernel":
        return self

    def __call__(self, *args: object, **options: object) -> None:
        if self._error is not None:
            raise self._error


def test_kernels_that_agree_with_torch_are_taken() -> None:
    chosen = attention_planner(4, 2, 16, 16, dtype=torch.bfloat16, device=CPU, gpu_kernels="triton")
    assert chosen.kernels == "triton"


def test_kernels_that_compute_something_else_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "merge_kernel", Kernel())
    kernel = PrefixAttention(6, 2, 16, torch.float32, 16, CPU)
    with pytest.raises(ValueError, match="something else than torch on this device: off by"):
        try_attention(kernel)


def test_kernels_that_fail_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend_kernel", Kernel(RuntimeError("out of resource\nmore of it")))
    with pytest.raises(
        ValueError, match=r"cannot be had: Triton's kernels fail on this device: RuntimeError: out of resource$"
    ):
        attention_planner(4, 2, 16, 16, dtype=torch.float32, device=CPU, gpu_kernels="triton")

"""The trial at start: what passes it, what a server is told that does not, and what computes then."""

from types import ModuleType

import pytest
import torch

from neaptide.kernels import choice
from neaptide.kernels.choice import choose_kernels
from neaptide.kernels.kv_copy import launch, reference
from neaptide.kernels.kv_write import launch as writing
from neaptide.kernels.layer_ops import TorchLayerOps
from neaptide.kernels.layer_ops.fused import FusedLayerOps
from neaptide.kernels.paged_attention import Shape
from neaptide.kernels.prefix_attention import attention
from neaptide.kernels.prefix_attention.attention import PrefixAttention
from neaptide.kernels.prefix_attention.trial import try_kernels
from tests.kernels.cases import CPU

SHAPE = Shape(4, 2, 16, 16)


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
    chosen = choose_kernels(SHAPE, dtype=torch.bfloat16, device=CPU, gpu_kernels="triton")
    assert (chosen.kind, type(chosen.layer_ops), chosen.slot_copier) == ("triton", FusedLayerOps, launch)


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [
        (writing, "write_kernel", "rotation"),
        (attention, "merge_kernel", "attention"),
        (launch, "copy_kernel", "copying slots"),
    ],
)
def test_kernels_that_compute_something_else_are_not(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, what: str
) -> None:
    monkeypatch.setattr(module, name, Kernel())
    kernel = PrefixAttention(4, 2, 16, torch.float32, 16, CPU)
    with pytest.raises(ValueError, match=f"other results than torch on this device: {what} is off by"):
        try_kernels(kernel)


def test_kernels_that_fail_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend_kernel", Kernel(RuntimeError("out of resource\nmore of it")))
    with pytest.raises(
        ValueError, match=r"is not available: Triton's kernels fail on this device: RuntimeError: out of resource$"
    ):
        choose_kernels(SHAPE, dtype=torch.float32, device=CPU, gpu_kernels="triton")


def test_where_one_kernel_fails_none_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose own choice it is: here a CPU stands for it, without kernels in C."""
    monkeypatch.setattr(choice, "wants_triton", lambda device, gpu_kernels: True)
    monkeypatch.setattr(launch, "copy_kernel", Kernel(RuntimeError("out of resource")))
    chosen = choose_kernels(SHAPE, dtype=torch.float32, device=CPU, cpu_kernels="torch")
    assert (chosen.kind, type(chosen.layer_ops), chosen.slot_copier) == ("torch", TorchLayerOps, reference)

"""Whether Triton's kernels can run, on a device or in its interpreter."""

import importlib.util
import os

import torch


def why_not(device: torch.device) -> str | None:
    """The reason why Triton cannot run for this device, in one line; None if it can.

    Does not import Triton, so that it also works where Triton is missing.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton compiles nothing for device {device.type!r}"
    return None


def wants_triton(device: torch.device, gpu_kernels: str) -> bool:
    """True for ``auto`` on a GPU and always for ``triton``. On a CPU Triton needs its interpreter."""
    return gpu_kernels == "triton" or (gpu_kernels == "auto" and device.type == "cuda")


def is_interpreted(kernel: object) -> bool:
    """Whether Triton's interpreter runs this kernel: TRITON_INTERPRET was 1 when Triton was imported.

    The interpreter computes bfloat16 on the raw bits (3.6 and 3.9): widen such numbers first.
    """
    return type(kernel).__name__ == "InterpretedFunction"

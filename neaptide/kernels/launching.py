"""Whether Triton's kernels can be launched, on a device or by its interpreter."""

import importlib.util
import os

import torch


def why_not(device: torch.device) -> str | None:
    """Why no kernel runs for tensors of this device, in one line; None if one does.

    Asks nothing of Triton, so that its absence is an answer.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton compiles nothing for device {device.type!r}"
    return None


def wants_triton(device: torch.device, gpu_kernels: str) -> bool:
    """``auto`` does on a GPU; ``triton`` always, and a CPU can have it with the interpreter alone."""
    return gpu_kernels == "triton" or (gpu_kernels == "auto" and device.type == "cuda")


def is_interpreted(kernel: object) -> bool:
    """Whether a kernel's Python is run as it stands: TRITON_INTERPRET=1 when Triton was imported.

    The interpreter computes bfloat16 on its bits (3.6 and 3.9): such numbers must be widened first.
    """
    return type(kernel).__name__ == "InterpretedFunction"

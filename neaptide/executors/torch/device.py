"""Chooses the device and the dtype."""

import logging
import platform
from pathlib import Path

import torch

from neaptide.executors.container_limits import free_in_container

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_FLAGS = {torch.bfloat16: ("amx_bf16", "avx512_bf16"), torch.float16: ("amx_fp16", "avx512_fp16")}


def pick_device(name: str) -> torch.device:
    """The device by name; ``auto`` is CUDA if there is a CUDA device.

    Raises:
        ValueError: an unknown name, or ``cuda`` without a CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported: auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' is set, but there is no CUDA device")
    return device


def pick_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype by name; ``auto`` is the checkpoint's own, or fp32 on a CPU without instructions for it.

    Without such instructions bf16 products are emulated through fp32, several times slower than fp32 itself.

    Raises:
        ValueError: an unknown name.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise ValueError(f"dtype {name!r} is not supported: auto, {', '.join(_DTYPES)}")
        return _DTYPES[name]
    dtype = _DTYPES[checkpoint_dtype]
    if device.type == "cpu" and dtype in _CPU_FLAGS and not (cpu_flags() & set(_CPU_FLAGS[dtype])):
        logger.info("this CPU has no %s arithmetic: running the checkpoint in float32", checkpoint_dtype)
        return torch.float32
    return dtype


def cpu_flags() -> set[str]:
    """Instruction set flags of the first core; empty if the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()


def device_name(device: torch.device) -> str:
    """Product name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def free_bytes(device: torch.device) -> int | None:
    """Memory in bytes that can be allocated without swapping or exceeding a container's limit; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable:")]
    in_container = free_in_container()
    return min(free if in_container is None else [*free, in_container], default=None)

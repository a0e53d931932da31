"""How many threads compute on a CPU, and whether they leave room for what simulates."""

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

LEAST_BYTES = 16 << 20
"""Of weights that a thread reads in a step: with fewer it mostly waits for the others. The embedded model (1.7 MB) is
computed in the same time by two threads as by one, and takes both cores for it."""


def default_num_threads(model_path: Path) -> int:
    """All cores but one, which the API process needs; but both of two, because threads that soon give up waiting
    (``interpreter.WAITING_THREADS``) lose less to it than half of the machine. Fewer for a small model."""
    cores = len(os.sched_getaffinity(0))
    weight_bytes = sum(path.stat().st_size for path in model_path.glob("*.safetensors"))
    return max(1, min(cores if cores == 2 else cores - 1, weight_bytes // LEAST_BYTES))


def may_simulate(shadow: str, device: str, num_threads: int) -> bool:
    """Whether the shadow gauge works of its own accord.

    Compute threads wait for each other at every layer, so what takes a little from one of them, at whatever priority,
    takes as much and more from all: where they have all cores, chats feel it.

    Args:
        shadow: the setting.
        device: kind of what computes.
        num_threads: that compute, on a CPU.
    """
    if shadow != "auto" or device != "cpu" or num_threads < len(os.sched_getaffinity(0)):
        return shadow != "off"
    logger.info("the engine computes on all cores: the shadow gauge rests; --shadow on has it work all the same")
    return False

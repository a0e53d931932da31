"""How many threads compute on a CPU."""

from pathlib import Path

from neaptide.executors.container_limits import usable_cores

LEAST_BYTES = 16 << 20
"""Of weights that a thread reads in a step: with fewer it mostly waits for the others. The embedded model (1.7 MB) is
computed in the same time by two threads as by one, and takes both cores for it."""


def default_num_threads(model_path: Path) -> int:
    """All cores but one, which the API process needs; but both of two, because threads that soon give up waiting
    (``interpreter.WAITING_THREADS``) lose less to it than half of the machine. Fewer for a small model."""
    cores = usable_cores()
    weight_bytes = sum(path.stat().st_size for path in model_path.glob("*.safetensors"))
    return max(1, min(cores if cores == 2 else cores - 1, weight_bytes // LEAST_BYTES))

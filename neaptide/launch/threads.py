"""Chooses the number of compute threads on a CPU."""

from pathlib import Path

from neaptide.executors.container_limits import usable_cores

LEAST_BYTES = 16 << 20
"""Weight bytes per thread and step: with fewer, a thread mostly waits for the others.

One thread computes the embedded model (1.7 MB) as fast as two, which would occupy both cores.
"""


def default_num_threads(model_path: Path) -> int:
    """All cores but one, which the API process needs; both on two cores; fewer for a small model.

    On two cores, threads that soon stop spinning (``interpreter.WAITING_THREADS``) lose less than half of the machine.
    """
    cores = usable_cores()
    weight_bytes = sum(path.stat().st_size for path in model_path.glob("*.safetensors"))
    return max(1, min(cores if cores == 2 else cores - 1, weight_bytes // LEAST_BYTES))

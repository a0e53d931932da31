"""The models that experiments run on."""

import os
from pathlib import Path

from neaptide.launch.serve import embedded_model_path


def path_of_111m() -> Path:
    """Where ``tools/make_111m.py`` or a benchmark writes the benchmark model."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "neaptide" / "llama-111m"


def model_111m() -> Path | None:
    """The benchmark model; None where it has not been written."""
    directory = path_of_111m()
    return directory if directory.is_dir() else None


def benchmark_model() -> Path:
    """The 111M model, or the embedded one where that is not there."""
    return model_111m() or embedded_model_path()

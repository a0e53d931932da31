"""The models that experiments run on."""

import os
from pathlib import Path

from neaptide.launch.serve import embedded_model_path

MODEL_111M = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "neaptide" / "llama-111m"
"""Where ``tools/make_111m.py`` or a benchmark writes the benchmark model."""


def model_111m() -> Path | None:
    """The benchmark model; None where it has not been written."""
    return MODEL_111M if (MODEL_111M / "model.safetensors").exists() else None


def benchmark_model() -> Path:
    """The 111M model, or the embedded one where that is not there."""
    return model_111m() or embedded_model_path()

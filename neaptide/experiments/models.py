"""The models that experiments run on."""

import os
from pathlib import Path

from neaptide.launch.serve import embedded_model_path


def model_111m() -> Path | None:
    """The benchmark model, where ``tools/make_111m.py`` or a benchmark has written it; None if nobody has."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    directory = root / "neaptide" / "llama-111m"
    return directory if (directory / "model.safetensors").exists() else None


def benchmark_model() -> Path:
    """The 111M model, or the embedded one where that is not there."""
    return model_111m() or embedded_model_path()

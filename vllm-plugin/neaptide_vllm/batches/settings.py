"""Settings of files and batches inside vLLM, by the environment variables of ``neaptide serve``."""

import os
from collections.abc import Mapping
from pathlib import Path

from neaptide.server.batches.wiring import BatchSettings

DATA_DIR, WINDOWS, RETENTION = "NEAPTIDE_DATA_DIR", "NEAPTIDE_COMPLETION_WINDOWS", "NEAPTIDE_FILE_RETENTION_DAYS"
DEFAULT_DATA_DIR = "~/.local/share/neaptide-vllm"
DAY_S = 86_400


def batch_settings(environment: Mapping[str, str] = os.environ) -> BatchSettings:
    """Raises ValueError for a value that cannot be read."""
    return BatchSettings(
        data_dir=Path(environment.get(DATA_DIR) or DEFAULT_DATA_DIR).expanduser(),
        completion_windows=tuple((environment.get(WINDOWS) or "24h").split(",")),
        file_life_s=int(float(environment.get(RETENTION) or 30) * DAY_S),
    )

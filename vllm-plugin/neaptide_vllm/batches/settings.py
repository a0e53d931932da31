"""Settings of files and batches inside vLLM, by the environment variables of ``neaptide serve``."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from neaptide.durations import window_seconds
from neaptide.engine.params import Tier
from neaptide.server.batches.storing.files import MAX_EXPIRY_S, MIN_EXPIRY_S
from neaptide.server.batches.wiring import BatchSettings
from neaptide.server.http.auth import KeyRing

DATA_DIR, WINDOWS, RETENTION = "NEAPTIDE_DATA_DIR", "NEAPTIDE_COMPLETION_WINDOWS", "NEAPTIDE_FILE_RETENTION_DAYS"
KEY_WEIGHTS = "NEAPTIDE_KEY_WEIGHTS"
DEFAULT_DATA_DIR = "~/.local/share/neaptide-vllm"
DAY_S = 86_400
T = TypeVar("T")


def batch_settings(environment: Mapping[str, str] = os.environ) -> BatchSettings:
    """Raises ValueError for a value that cannot be read; the message names the variable."""
    return BatchSettings(
        data_dir=Path(environment.get(DATA_DIR) or DEFAULT_DATA_DIR).expanduser(),
        completion_windows=_read(environment, WINDOWS, "24h", _windows),
        file_life_s=_read(environment, RETENTION, "30", _life_s),
    )


def key_weights(environment: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Weights of API keys in offline work, by share; a key that is not named has 1.

    Raises:
        ValueError: an entry is not ``KEY:xWEIGHT``. The message names the variable and no key.
    """
    return _read(environment, KEY_WEIGHTS, "", _weights)


def _read(environment: Mapping[str, str], name: str, default: str, read: Callable[[str], T]) -> T:
    try:
        return read(environment.get(name) or default)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _windows(text: str) -> tuple[str, ...]:
    windows = tuple(text.split(","))
    for window in windows:
        window_seconds(window)
    return windows


def _life_s(text: str) -> int:
    days = float(text)
    if not MIN_EXPIRY_S <= days * DAY_S <= MAX_EXPIRY_S:
        raise ValueError(f"{text} must be from {MIN_EXPIRY_S / DAY_S:.3f} to {MAX_EXPIRY_S // DAY_S} days")
    return int(days * DAY_S)


def _weights(text: str) -> dict[str, float]:
    ring = KeyRing([entry.strip() for entry in text.split(",") if entry.strip()])
    for one in ring.principals:
        # Whether a key may do something is vLLM's to say.
        if one.is_admin or one.tier is not Tier.DEFAULT:
            raise ValueError("only a weight may follow a key, as in KEY:x2")
    return ring.share_weights

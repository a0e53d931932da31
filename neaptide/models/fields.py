"""Reads single entries of a ``config.json``, for all families."""

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from neaptide.models.config import UnsupportedModelError

RawConfig = dict[str, Any]
"""The content of a ``config.json``."""

_DTYPES = ("float32", "bfloat16", "float16")


MAX_CONFIG_BYTES = 64 << 20
MAX_TOKENIZER_BYTES = 512 << 20
LFS_POINTER = "version https://git-lfs"
"""Beginning of a file that stands in a clone for one that Git LFS keeps."""


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    """Text of a file of a model directory. A pipe or device is not read: it might never end.

    Raises:
        OSError: there is no such file, or it cannot be read.
        UnsupportedModelError: it is no regular file, too large or not UTF-8.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnsupportedModelError(f"{path.name} is not a regular file")
        if status.st_size > max_bytes:
            raise UnsupportedModelError(f"{path.name} has {status.st_size} bytes; the limit is {max_bytes}")
        try:
            text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from error
    if text.startswith(LFS_POINTER):
        raise UnsupportedModelError(lfs_pointer(path))
    return text


def lfs_pointer(path: Path) -> str:
    """Why a file is not read whose content a clone without Git LFS has left out."""
    return f"{path.name} is a pointer of Git LFS, not the file: run `git lfs pull` in {path.parent}"


def read_json(path: Path) -> RawConfig:
    try:
        value = json.loads(read_text(path))
    except UnsupportedModelError:
        raise
    except FileNotFoundError:
        missing = f"{path.name} is missing in {path.parent}"
        raise UnsupportedModelError(f"{missing}: this is not a model directory in Hugging Face layout") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path.name} is not a JSON object")
    return value


def positive_int(raw: RawConfig, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def entries(raw: RawConfig, key: str) -> RawConfig:
    """An object in the configuration; empty if it is missing."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"config.json: {key} must be an object, not {value!r}")
    return value


def number(raw: RawConfig, key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UnsupportedModelError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UnsupportedModelError(f"eos_token_id {value!r} is not a token id")
    return tuple(ids)


def dtype(raw: RawConfig) -> str:
    """The weights' type; ``checkpoint`` fills it in where the file has none."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError(f"dtype {name!r} is not supported: only {', '.join(_DTYPES)}")
    return name

"""Headers of safetensors files: names, types and shapes of tensors, without the weights themselves."""

import json
import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from neaptide.models.config import ModelFacts, UnsupportedModelError
from neaptide.models.fields import LFS_POINTER, lfs_pointer

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LAYER = re.compile(r"\b(?:layers|h)\.(\d+)\.")
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")


class TensorHeader(NamedTuple):
    dtype: str
    """As in the file, for example ``BF16``."""
    shape: tuple[int, ...]


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """The tensors of all files, by name.

    Raises:
        UnsupportedModelError: a file is no safetensors file.
    """
    found: dict[str, TensorHeader] = {}
    for file in files:
        try:
            found |= _read(file)
        except UnsupportedModelError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "its header is damaged"
            raise UnsupportedModelError(f"{file.name} cannot be read: {reason}") from error
    return found


def _read(path: Path) -> dict[str, TensorHeader]:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnsupportedModelError(f"{path.name} is not a regular file")
        start = file.read(_LENGTH.size)
        if LFS_POINTER.encode().startswith(start) and start:
            raise UnsupportedModelError(lfs_pointer(path))
        (length,) = _LENGTH.unpack(start.ljust(_LENGTH.size, b"\xff"))
        if length > min(_MAX_HEADER_BYTES, status.st_size):
            raise ValueError("length of the header")
        entries = json.loads(file.read(length))
    return {
        str(name): TensorHeader(str(entry["dtype"]), tuple(map(int, entry["shape"])))
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def dtype_of(headers: Mapping[str, TensorHeader]) -> str | None:
    """The type of most weights; None if there are no float ones."""
    counts: Counter[str] = Counter()
    for header in headers.values():
        if header.dtype in _DTYPES:
            counts[_DTYPES[header.dtype]] += prod(header.shape)
    return max(counts, key=counts.__getitem__, default=None)


def num_parameters(headers: Mapping[str, TensorHeader]) -> int:
    return sum(prod(header.shape) for header in headers.values())


def check_size(headers: Mapping[str, TensorHeader], facts: ModelFacts, num_layers: int) -> None:
    """Checks the sizes that everything is built from, before anything is.

    Raises:
        UnsupportedModelError: the weights have other sizes than ``config.json`` says.
    """
    layers = {int(match.group(1)) for name in headers if (match := _LAYER.search(name))}
    if layers and num_layers > max(layers) + 1:
        raise UnsupportedModelError(
            f"config.json: num_hidden_layers is {num_layers}, but the weights have {max(layers) + 1} layers"
        )
    for name, header in headers.items():
        table = next((end for end in _EMBEDDINGS if name.endswith(end)), None)
        if table is not None and header.shape[:1] != (facts.vocab_size,):
            raise UnsupportedModelError(
                f"config.json: vocab_size is {facts.vocab_size}, but {table} has the shape {list(header.shape)}"
            )

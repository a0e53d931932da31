"""Which requests the running step has: kept where it outlives the process that runs it."""

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class StepWitness:
    """Written by the engine around every step, in memory that the kernel keeps when the process is killed."""

    def __init__(self, path: str) -> None:
        with open(path, "w+b") as file:
            file.truncate(MAX_BYTES)
            self._map = mmap.mmap(file.fileno(), MAX_BYTES)

    def __call__(self, request_ids: Sequence[str]) -> None:
        """Notes the step that begins, or with no ids that none runs. Ids beyond ``MAX_BYTES`` are left out."""
        data = "\n".join(request_ids).encode()[: MAX_BYTES - _LENGTH.size]
        # The length last: a torn note reads as "no step".
        self._map[: _LENGTH.size] = _LENGTH.pack(0)
        self._map[_LENGTH.size : _LENGTH.size + len(data)] = data
        self._map[: _LENGTH.size] = _LENGTH.pack(len(data))


def read_witness(path: Path) -> list[str]:
    """Ids of the requests in the step that a dead engine was running; empty if it was between steps."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    if len(data) < _LENGTH.size:
        return []
    (length,) = _LENGTH.unpack_from(data)
    text = data[_LENGTH.size : _LENGTH.size + length].decode(errors="replace")
    return text.split("\n") if text else []

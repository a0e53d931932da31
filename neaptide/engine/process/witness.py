"""Which requests the running step has: kept where it outlives the process that runs it, and where no disk is needed."""

import mmap
import os
import struct
from collections.abc import Sequence

MAX_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


def create_witness() -> int:
    """A descriptor of anonymous memory, for the process that watches; the one that is watched inherits it."""
    fd = os.memfd_create("step-witness")
    os.ftruncate(fd, MAX_BYTES)
    return fd


class StepWitness:
    """Written by the engine around every step."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, MAX_BYTES)

    def __call__(self, request_ids: Sequence[str]) -> None:
        """Notes the step that begins, or with no ids that none runs. What goes beyond ``MAX_BYTES`` is left out."""
        data = "\n".join(request_ids).encode()[: MAX_BYTES - _LENGTH.size]
        # The length last: a torn note reads as "no step".
        self._map[: _LENGTH.size] = _LENGTH.pack(0)
        self._map[_LENGTH.size : _LENGTH.size + len(data)] = data
        self._map[: _LENGTH.size] = _LENGTH.pack(len(data))


def read_witness(fd: int) -> list[str]:
    """Ids of the requests in the step that a dead engine was running; empty if it was between steps."""
    (length,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, 0))
    text = os.pread(fd, length, _LENGTH.size).decode(errors="replace")
    return text.split("\n") if text else []

"""Crash marker: the requests of the running step and its longest time. It is in memory that outlives the engine
process, and needs no disk."""

import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

MAX_BYTES = 1 << 20
_HEAD = struct.Struct("<Id")
"""Bytes of request ids, and the predicted seconds of the step."""
_NOTHING = _HEAD.pack(0, 0.0)


def create_crash_marker() -> int:
    """Makes the crash marker's memory in the watching process; returns a descriptor that the engine inherits."""
    fd = os.memfd_create("step-witness")
    os.ftruncate(fd, MAX_BYTES)
    return fd


class CrashMarker:
    """Crash marker, written by the engine around every step."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, MAX_BYTES)

    def __call__(self, request_ids: Sequence[str], predicted_s: float = 0.0) -> None:
        """Notes the step that begins; without ids, that none runs. Data beyond ``MAX_BYTES`` is dropped."""
        data = "\n".join(request_ids).encode()[: MAX_BYTES - _HEAD.size]
        # The head is written last, so that a torn note reads as "no step".
        self._map[: _HEAD.size] = _NOTHING
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        self._map[: _HEAD.size] = _HEAD.pack(len(data), predicted_s)


class RunningStep(NamedTuple):
    """The step that an engine is running, or that it crashed in. Empty between steps."""

    request_ids: list[str]
    predicted_s: float


def read_crash_marker(fd: int) -> RunningStep:
    """The engine's last note."""
    length, predicted_s = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
    text = os.pread(fd, length, _HEAD.size).decode(errors="replace")
    return RunningStep(text.split("\n") if text else [], predicted_s)

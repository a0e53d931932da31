"""Which requests the running step has, and how long it may take: kept where it outlives the process that runs it, and
where no disk is needed."""

import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

MAX_BYTES = 1 << 20
_HEAD = struct.Struct("<Id")
"""Bytes of request ids, and the seconds that the step is predicted to take."""
_NOTHING = _HEAD.pack(0, 0.0)


def create_witness() -> int:
    """A descriptor of anonymous memory, for the process that watches; the one that is watched inherits it."""
    fd = os.memfd_create("step-witness")
    os.ftruncate(fd, MAX_BYTES)
    return fd


class StepWitness:
    """Written by the engine around every step."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, MAX_BYTES)

    def __call__(self, request_ids: Sequence[str], predicted_s: float = 0.0) -> None:
        """Notes the step that begins, or with no ids that none runs. What goes beyond ``MAX_BYTES`` is left out."""
        data = "\n".join(request_ids).encode()[: MAX_BYTES - _HEAD.size]
        # The head last: a torn note reads as "no step".
        self._map[: _HEAD.size] = _NOTHING
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        self._map[: _HEAD.size] = _HEAD.pack(len(data), predicted_s)


class RunningStep(NamedTuple):
    """The step that an engine is in, or did not survive. Empty between steps."""

    request_ids: list[str]
    predicted_s: float


def read_witness(fd: int) -> RunningStep:
    """What the engine noted last."""
    length, predicted_s = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
    text = os.pread(fd, length, _HEAD.size).decode(errors="replace")
    return RunningStep(text.split("\n") if text else [], predicted_s)

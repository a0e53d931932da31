"""Counters of sent online requests: memory that the API process writes and a running step reads. An arrival aborts the
step (ADR 56)."""

import ctypes
import mmap
import os

from neaptide.engine.messages import AddRequest, ToEngine
from neaptide.engine.params import RequestClass, request_class

_Counts = ctypes.c_int64 * 2
_SENT, _TAKEN = 0, 1


def create_arrivals() -> int:
    """Makes the shared memory in the process that sends; returns a descriptor that the engine inherits."""
    fd = os.memfd_create("online-arrivals")
    os.ftruncate(fd, ctypes.sizeof(_Counts))
    return fd


class OnlineArrivals:
    """Two counters, each written by one side alone. A message is counted only once it has been sent, so the engine
    never waits for one that failed to be sent."""

    def __init__(self, fd: int) -> None:
        self._counts = _Counts.from_buffer(mmap.mmap(fd, ctypes.sizeof(_Counts)))

    def note_sent(self, message: ToEngine) -> None:
        if _is_online(message):
            self._counts[_SENT] += 1

    def note_taken(self, message: ToEngine) -> None:
        if _is_online(message):
            self._counts[_TAKEN] += 1

    @property
    def are_on_their_way(self) -> bool:
        return self._counts[_SENT] > self._counts[_TAKEN]

    @property
    def address(self) -> int:
        """Address of two ``int64``: sent, taken. Valid as long as this object."""
        return ctypes.addressof(self._counts)


def _is_online(message: ToEngine) -> bool:
    return isinstance(message, AddRequest) and request_class(message.tier) is RequestClass.ONLINE

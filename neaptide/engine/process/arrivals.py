"""How many online requests are on their way to the engine: memory that the server's process writes and a running step
reads, so that it can be given up for one (ADR 48)."""

import ctypes
import mmap
import os

from neaptide.engine.messages import AddRequest, ToEngine
from neaptide.engine.params import RequestClass, request_class

_Counts = ctypes.c_int64 * 2
_SENT, _TAKEN = 0, 1


def create_arrivals() -> int:
    """A descriptor of anonymous memory, for the process that sends; the engine inherits it."""
    fd = os.memfd_create("online-arrivals")
    os.ftruncate(fd, ctypes.sizeof(_Counts))
    return fd


class OnlineArrivals:
    """Two counters, each written by one side alone. A message is counted when it has been sent, so one that could not
    be is never waited for."""

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
        """Of two ``int64``: sent, taken. Valid as long as this object is."""
        return ctypes.addressof(self._counts)


def _is_online(message: ToEngine) -> bool:
    return isinstance(message, AddRequest) and request_class(message.tier) is RequestClass.ONLINE

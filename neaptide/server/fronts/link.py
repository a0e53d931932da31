"""Frames in both directions between the owner and one front process, over a socket pair."""

import asyncio
from collections.abc import Callable

import msgspec

from neaptide.server.fronts.messages import front_encoder
from neaptide.server.subprocesses.frames import framed, take_frames


class FrontLink(asyncio.Protocol):
    """One end of the socket pair.

    Args:
        on_frame: gets each frame's content, and whether no other is here. If it raises, the connection ends.
    """

    def __init__(self, on_frame: Callable[[bytes, bool], None]) -> None:
        self._on_frame = on_frame
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection has ended and everything has been read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        frames = take_frames(self._received)
        for number, frame in enumerate(frames, 1):
            self._on_frame(frame, number == len(frames))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def tell(self, message: msgspec.Struct) -> None:
        """Sends a message. Never waits; a message to a process that has ended is lost."""
        if self._transport is not None:
            self._transport.write(framed(front_encoder.encode(message)))

    def close(self) -> None:
        """Closes the connection after everything has been sent."""
        if self._transport is not None:
            self._transport.close()

"""Frames between the server and a child process: a length (4 bytes, big-endian), then so many bytes."""

import asyncio
import struct
from typing import BinaryIO

_LENGTH = struct.Struct(">I")
MAX_BYTES = (1 << 32) - 1
"""That the length can say."""


def framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def read_frame(source: BinaryIO) -> bytes | None:
    """None at the end of the input."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = source.read(length)
    return payload if len(payload) == length else None


def write_frame(sink: BinaryIO, payload: bytes) -> None:
    sink.write(framed(payload))
    sink.flush()


async def receive_frame(source: asyncio.StreamReader, max_bytes: int = MAX_BYTES) -> bytes:
    """Raises asyncio.IncompleteReadError at the end of the input, ValueError for a longer frame."""
    (length,) = _LENGTH.unpack(await source.readexactly(_LENGTH.size))
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes, where {max_bytes} are the most")
    return await source.readexactly(length)

"""Frames between the server and a child process: a length (4 bytes, big-endian), then that many bytes."""

import asyncio
import struct
from typing import BinaryIO

_LENGTH = struct.Struct(">I")
MAX_BYTES = (1 << 32) - 1
"""Largest length of a frame."""


def framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def read_frame(source: BinaryIO) -> bytes | None:
    """The next frame's content; None at the end of the input."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = source.read(length)
    return payload if len(payload) == length else None


def write_frame(sink: BinaryIO, payload: bytes) -> None:
    sink.write(framed(payload))
    sink.flush()


def take_frames(received: bytearray) -> list[bytes]:
    """Contents of the complete frames at the beginning, which are removed."""
    frames: list[bytes] = []
    start = 0
    while len(received) - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received, start)
        end = start + _LENGTH.size + length
        if end > len(received):
            break
        frames.append(bytes(received[start + _LENGTH.size : end]))
        start = end
    del received[:start]
    return frames


async def receive_frame(source: asyncio.StreamReader, max_bytes: int = MAX_BYTES) -> bytes:
    """The next frame's content. Raises asyncio.IncompleteReadError at the end of the input, ValueError if it is too
    long."""
    (length,) = _LENGTH.unpack(await source.readexactly(_LENGTH.size))
    if length > max_bytes:
        raise ValueError(f"a frame has {length} bytes; the limit is {max_bytes}")
    return await source.readexactly(length)

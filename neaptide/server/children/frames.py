"""Frames between the server and a child process: a length (4 bytes, big-endian), then so many bytes."""

import struct
from typing import BinaryIO

NO_GRAMMARS_STATUS = 3
"""Of a child that ends because no grammar can be laid over the tokens of its model."""
_LENGTH = struct.Struct(">I")


def read_frame(source: BinaryIO) -> bytes | None:
    """None at the end of the input."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = source.read(length)
    return payload if len(payload) == length else None


def write_frame(sink: BinaryIO, payload: bytes) -> None:
    sink.write(_LENGTH.pack(len(payload)) + payload)
    sink.flush()

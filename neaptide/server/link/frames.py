"""Frames between the server and a child process: a length (4 bytes, big-endian), then so many bytes."""

import os
import struct
import sys
from typing import BinaryIO

LENGTH = struct.Struct(">I")


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


def read_frame(source: BinaryIO) -> bytes | None:
    """None at the end of the input."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    payload = source.read(length)
    return payload if len(payload) == length else None


def write_frame(sink: BinaryIO, payload: bytes) -> None:
    sink.write(framed(payload))
    sink.flush()


def conversation() -> tuple[BinaryIO, BinaryIO]:
    """A child's ends of it: its standard input and output. What a library prints goes to standard error from now on."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return source, sink

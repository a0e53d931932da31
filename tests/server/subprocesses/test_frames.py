"""Frames out of a stream of bytes that is cut anywhere."""

import pytest

from neaptide.server.subprocesses.frames import framed, take_frames

STREAM = framed(b"one") + framed(b"") + framed(b"three")


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_frames_are_taken_when_they_are_complete(cut: int) -> None:
    received = bytearray(STREAM[:cut])
    first = take_frames(received)
    assert first == [b"one", b"", b"three"][: (cut >= 7) + (cut >= 11) + (cut >= 20)]
    received += STREAM[cut:]
    assert first + take_frames(received) == [b"one", b"", b"three"]
    assert not received

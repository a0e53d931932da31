"""What a burst took is given back, by the allocator's own books."""

import ctypes
import subprocess
import sys

import pytest

BURST = """
import ctypes
from neaptide.server.text.native_memory import KEPT_BYTES, keep_little

class Books(ctypes.Structure):
    _fields_ = [(f"number_{k}", ctypes.c_size_t) for k in range(10)]  # the first: bytes of the heap

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Books
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
heap_bytes = lambda: libc.mallinfo2().number_0
keep_little()
libc.free(libc.malloc(24 << 20))  # else it would keep twice as much from here on
blocks = [0] * 400  # no list may grow between the blocks
before = heap_bytes()
for k in range(400):
    blocks[k] = libc.malloc(60_000)
assert heap_bytes() > before + (20 << 20)
for block in reversed(blocks):
    libc.free(block)
assert heap_bytes() <= before + 2 * KEPT_BYTES, (before, heap_bytes())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_what_was_freed_is_not_kept() -> None:
    done = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

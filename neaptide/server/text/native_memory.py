"""Limits the freed memory that the C library's allocator keeps.

Tokenizing a prompt of 80 kB takes about 30 MB, mostly in small pieces. glibc keeps that memory in every thread that has
tokenized one, because each has its own heap, and large blocks raise its trim threshold. Eight such prompts left 120 MB
in an otherwise idle process, and none with these limits. In a server, where long-lived small blocks may be at a heap's
end, about 60 MB remain. With another C library, nothing is done.
"""

import ctypes

KEPT_BYTES = 1 << 20
"""Free memory kept at the end of a heap. Larger blocks are outside of heaps and are returned at once."""
HEAPS = 2
"""Number of heaps. The threads that tokenize share the interpreter lock and seldom allocate at once."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # Constants of malloc.h.


def keep_little() -> None:
    """Sets the limits for the whole process."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        for what, number in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, KEPT_BYTES), (M_ARENA_MAX, HEAPS)):
            libc.mallopt(what, number)

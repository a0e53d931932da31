"""What the C library's allocator keeps of memory that has been freed.

To tokenize a prompt of 80 kB takes some 30 MB, most of it in small pieces. glibc keeps that, in every thread that has
tokenized one, for each has a heap of its own and large blocks teach it to give nothing back. Eight such prompts left
120 MB behind in a process that did nothing else, and none with what is fixed here; a server, where something small that
lives on may stand at a heap's end, is left with some 60. Where there is another C library, nothing is done.
"""

import ctypes

KEPT_BYTES = 1 << 20
"""At the end of a heap. Blocks of this size are no part of one: the system gets them back at once."""
HEAPS = 2
"""The threads that tokenize have the interpreter between them, and seldom allocate at once."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h


def keep_little() -> None:
    """For the whole process, from now on."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        for what, number in ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, KEPT_BYTES), (M_ARENA_MAX, HEAPS)):
            libc.mallopt(what, number)

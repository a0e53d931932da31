"""A child of the server that says how it stands, and then tries to take as much memory as it is told to."""

import json
import os

from neaptide.server.subprocesses.child import bound_memory, pipes, set_idle_priority
from neaptide.server.subprocesses.frames import read_frame, write_frame

if __name__ == "__main__":
    set_idle_priority(3, is_idle=True)
    source, sink = pipes()
    bound_memory(64 << 20, beside_what_is_here=True)
    print("a library says something")
    found = {"niceness": os.nice(0), "scheduling": os.sched_getscheduler(0)}
    write_frame(sink, json.dumps(found).encode())
    while (frame := read_frame(source)) is not None:
        try:
            write_frame(sink, b"taken" if bytearray(int(frame)) else b"")
        except MemoryError:
            write_frame(sink, b"refused")

"""A planner that does what the order that it is asked for says."""

import os
import signal
import sys
import time

from neaptide.engine.messages import PlanReady
from neaptide.server.batches.planning.request import PlanFailed, answer_encoder, request_decoder
from neaptide.server.subprocesses.child import pipes
from neaptide.server.subprocesses.frames import framed, read_frame, write_frame

if __name__ == "__main__":
    source, sink = pipes()
    order = request_decoder.decode(read_frame(source) or b"").order
    if order == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if order == "hang":
        time.sleep(600)
    if order == "rubbish":
        write_frame(sink, b"rubbish")
    if order == "torn":
        sys.stdout.flush()
        sink.write(framed(bytes(1000))[:500])
    if order == "long":
        sink.write(b"\xff\xff\xff\xff")
    if order == "other":
        write_frame(sink, answer_encoder.encode(PlanReady(["b"], bytes(4), bytes(4))))
    if order == "failed":
        write_frame(sink, answer_encoder.encode(PlanFailed("MemoryError")))
    sink.flush()

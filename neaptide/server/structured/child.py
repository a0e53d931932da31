"""Child process that compiles new grammars. It may be killed at any time.

``python -m neaptide.server.structured.child MODEL_DIR VOCAB_SIZE EOS,EOS... CPU_S MEMORY_BYTES`` reads grammars from
standard input and answers each with the compiler's complaint on standard output, empty for none. Frames are a length
(4 bytes, big-endian) and UTF-8. It sends the empty frame once when it is ready.

A grammar that takes longer than ``CPU_S`` ends it by a signal; one that takes too much memory ends it as the compiler
fails. It also ends when its input ends, together with its parent.
"""

import signal
import sys
from pathlib import Path
from typing import BinaryIO

from neaptide.engine.process.parent import ignore_stop_signals
from neaptide.models.grammars import GrammarError, Grammars
from neaptide.server.structured.statuses import NO_GRAMMARS_STATUS
from neaptide.server.subprocesses.child import bound_memory, pipes, set_idle_priority
from neaptide.server.subprocesses.frames import read_frame, write_frame

NICENESS = 10


def main(model_dir: Path, vocab_size: int, eos_token_ids: list[int], cpu_s: float, memory_bytes: int) -> int:
    set_idle_priority(NICENESS)
    ignore_stop_signals()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, sink = pipes()
    try:
        grammars = Grammars(model_dir, vocab_size, eos_token_ids)
    except GrammarError:
        return NO_GRAMMARS_STATUS
    bound_memory(memory_bytes, beside_what_is_here=True)
    write_frame(sink, b"")
    _answer(source, sink, grammars, cpu_s)
    return 0


def _answer(source: BinaryIO, sink: BinaryIO, grammars: Grammars, cpu_s: float) -> None:
    while (grammar := read_frame(source)) is not None:
        complaint = ""
        # Counts CPU time, so that a busy machine refuses nothing. The signal's default action ends even native code.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            grammars.check(grammar.decode())
        except GrammarError as error:
            complaint = str(error) or "invalid"
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(sink, complaint.encode(errors="replace"))


if __name__ == "__main__":
    directory, vocab, eos, seconds, memory = sys.argv[1:]
    ends = [int(token) for token in eos.split(",") if token]
    sys.exit(main(Path(directory), int(vocab), ends, float(seconds), int(memory)))

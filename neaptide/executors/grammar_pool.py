"""Threads in which matchers work, without the interpreter's lock."""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher

from neaptide.executors.grammar_places import Bits
from neaptide.models.grammars import Grammars

_TASKS = Path("/proc/self/task")
_making = threading.Lock()
"""One pool of threads is made at a time, so that it is known which are its own."""


class MatcherPool:
    """Threads of the library's own that let matchers consume tokens and compute masks, without the interpreter's lock.

    The library uses them, and gives up that lock for every kind of work, where there are several matchers: a single one
    gets company. Only such threads may be put back behind others: one that also holds the interpreter's lock would keep
    the engine waiting for a processor that it does not get.
    """

    def __init__(self, grammars: Grammars, num_threads: int, niceness: int = 0) -> None:
        with _making:
            before = set(os.listdir(_TASKS))
            self.executor = LLExecutor(num_threads=num_threads)
            self._threads = set(os.listdir(_TASKS)) - before
        self._companion = LLMatcher(grammars.tokenizer, "no grammar", log_level=0)
        """It refuses everything at once."""
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for thread in self._threads if niceness else ():
            with contextlib.suppress(OSError):  # not one of ours, and it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread), min(own + niceness, 19))

    def consume(self, matchers: Sequence[LLMatcher], token_ids: Sequence[int]) -> None:
        """One token each."""
        pairs = list(zip(matchers, token_ids, strict=True))
        if pairs:
            self.executor.consume_token_par([*pairs, (self._companion, 0)])

    def mask(self, matchers: Sequence[LLMatcher], num_words: int) -> Bits:
        """[matchers, words]"""
        bits = np.zeros((len(matchers) + 1, num_words), np.int32)
        rows = [(matcher, index) for index, matcher in enumerate([*matchers, self._companion])]
        self.executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.shape[1] * 4, len(bits))
        return bits[: len(matchers)]

    @property
    def cpu_s(self) -> float:
        """Processor time that its threads have had."""
        try:
            files = [(_TASKS / thread / "schedstat").read_text() for thread in self._threads]
            return sum(int(text.split()[0]) for text in files) / 1e9
        except (OSError, ValueError, IndexError):
            return time.perf_counter()  # the kernel does not count; at least so little has it been

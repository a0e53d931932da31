"""Threads in which matchers run without the interpreter's lock."""

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
MAKER = "maker of threads"
"""Name of the thread that creates a pool with a niceness."""
_making = threading.Lock()
"""Pools are created one at a time, so that each pool's threads can be identified."""


class MatcherPool:
    """The library's own threads, in which matchers consume tokens and compute masks.

    The library uses them, and releases the interpreter's lock, only if there are several matchers. So a companion joins
    a single one. Only these threads may get a low priority. A low-priority thread that holds the interpreter's lock
    would stall the engine.

    Args:
        niceness: of the threads, added to the process's own.
    """

    def __init__(self, grammars: Grammars, num_threads: int, niceness: int = 0) -> None:
        self._num_words = grammars.num_words
        self._companion = LLMatcher(grammars.tokenizer, "no grammar", log_level=0)
        """A matcher that rejects everything immediately."""
        self._threads: list[str] = []
        """Thread ids of a pool with a niceness."""
        if niceness:
            with _making:
                maker = threading.Thread(target=self._make, name=MAKER, args=(num_threads, niceness))
                maker.start()
                maker.join()
        else:
            self.executor = LLExecutor(num_threads=num_threads)

    def _make(self, num_threads: int, niceness: int) -> None:
        """Creates the threads. They inherit the niceness of this thread, which cannot lower it again and therefore
        ends."""
        own = threading.get_native_id()
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, 19)
        before = set(os.listdir(_TASKS))
        os.setpriority(os.PRIO_PROCESS, own, niceness)
        self.executor = LLExecutor(num_threads=num_threads)
        for thread in set(os.listdir(_TASKS)) - before:
            try:
                if os.getpriority(os.PRIO_PROCESS, int(thread)) == niceness:
                    self._threads.append(thread)
            except OSError:
                continue  # a foreign thread that has ended

    def consume(self, matchers: Sequence[LLMatcher], token_ids: Sequence[int]) -> None:
        """Feeds one token to each matcher."""
        pairs = list(zip(matchers, token_ids, strict=True))
        if pairs:
            self.executor.consume_token_par([*pairs, (self._companion, 0)])

    def mask(self, matchers: Sequence[LLMatcher], num_words: int) -> tuple[Bits, float]:
        """The first words of the masks [matchers, num_words], and the processor time they took, which is at most the
        elapsed time."""
        bits = np.zeros((len(matchers) + 1, self._num_words), np.int32)
        rows = [(matcher, index) for index, matcher in enumerate([*matchers, self._companion])]
        cpu_s, start_s = self._cpu_s(), time.perf_counter()
        self.executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.shape[1] * 4, len(bits))
        took_s = time.perf_counter() - start_s
        return bits[: len(matchers), :num_words], min(self._cpu_s() - cpu_s, took_s) if self._threads else took_s

    def _cpu_s(self) -> float:
        """Processor time used by the pool's threads, in seconds."""
        texts = [(_TASKS / thread / "schedstat").read_text() for thread in self._threads]
        return sum(int(text.split()[0]) for text in texts) / 1e9

"""Computes which tokens each request's grammar allows next, on the host while the device runs the forward pass.

A step waits for masks up to a limit. Slower masks are computed in low-priority threads while later steps run. Their
requests sample nothing meanwhile, and the engine is given an estimate of the delay. Grammars known to be quick never
queue after slow ones.
"""

import contextlib
import ctypes
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, PriorityQueue
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from neaptide.engine.arrays import TokenArray
from neaptide.engine.params import GRAMMAR_ERROR
from neaptide.executors.grammar_places import (
    COMPILE_BYTES_PER_S,
    MASK_BYTES_PER_S,
    Bits,
    Follower,
    GrammarPlace,
    GrammarPlaces,
)
from neaptide.executors.grammar_pool import MatcherPool
from neaptide.executors.step_mask import Constrained, Patience, StepMask
from neaptide.models.grammars import GrammarError, Grammars

logger = logging.getLogger(__name__)

MAX_THREADS = 8
"""Threads for the masks of one step. With a GPU, the host's cores are idle."""
QUICK_S = 0.001
"""Longest processor time of a quick mask. Masks of slower grammars are computed while steps run."""
NICENESS = 10
"""Niceness of the threads for slow masks. They get about a tenth of a contended core."""
REST = 3.0
"""Pause after a compilation, as a multiple of its processor time. Only a Python thread can compile a grammar."""
LEAST_LATE_S, MOST_LATE_S = 0.005, 1.0
"""Limits of the delay before a late mask is asked for again."""
WAITED_PER_S = 20.0
"""Queue penalty per second of cost: a mask of 1 s yields to free masks that arrive up to this many seconds later."""
LOOK_S = 0.001
"""Period of the check whether a request waits for the device."""
SLICE_S = 0.05
"""Longest time that one matcher re-reads its output before the next one in the queue gets its turn."""
COMPILE_S_PER_CHARACTER = 1e-6
TRIM_BYTES, TRIM_AFTER_S = 4 << 20, 1.0
"""Freed memory of this size is returned to the system after this time without a request for a mask."""
CLOSE_S = 2.0
_NO_TOKENS: TokenArray = np.zeros(0, np.int32)


class StepFill:
    """The masks of one step while they are computed."""

    def __init__(self, masks: "GrammarMasks", request_ids: list[str]) -> None:
        self._masks = masks
        self.request_ids = request_ids
        self.places: list[GrammarPlace | None] | None = None
        """Place of each request, None for a failed one; None before the places are known."""
        self.error: Exception | None = None
        self._mask: StepMask | None = None

    def collect(self, patience: Patience | None = None) -> StepMask:
        """The masks that are ready after waiting as ``patience`` allows (None: for all). Repeated calls return the
        same."""
        if self._mask is None:
            self._mask = self._masks._collect(self, patience)
        return self._mask


PATIENT = Patience(math.inf, False, 0.0)


class _MaskJob(NamedTuple):
    due_s: float
    number: int
    cost_s: float = 0.0
    """Expected processor time."""
    place: GrammarPlace | None = None
    """None ends the thread."""


class GrammarMasks:
    """Computes masks in its own threads. ``_changed`` guards everything in ``_places``.

    Args:
        directory: of the model.
        num_threads: threads that compute masks; 0 picks a number.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int], num_threads: int = 0) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = tuple(eos_token_ids)
        self._num_threads = num_threads or max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._quick = ThreadPoolExecutor(1, "masks")
        self._threads: list[threading.Thread] = []
        self._queue: PriorityQueue[_MaskJob] = PriorityQueue()
        self._num_jobs = 0
        self._queued_s = 0.0
        """Expected total time of the queued jobs."""
        self._places = GrammarPlaces()
        self._changed = threading.Condition()
        self._grammars: Grammars | None = None
        self._loading = threading.Lock()
        self._pool: MatcherPool | None = None
        """Threads for quick masks."""

    @property
    def num_bytes(self) -> int:
        """Estimated memory of all matchers."""
        return self._places.num_bytes

    def warm_up(self) -> None:
        """Loads the tokenizer before the first grammar arrives."""
        try:
            self._load()
        except GrammarError as error:
            logger.info("no structured output: %s", error)
            return
        with self._changed:
            self._start_threads()

    def compile(self, follower: Follower) -> None:
        """Starts a new request's first mask while steps compute its prompt."""
        with self._changed:
            self._request(self._places.move(follower, _NO_TOKENS))

    def leave(self, follower: Follower) -> None:
        """Drops the place of a request that has ended."""
        with self._changed:
            self._places.leave(follower)

    def fill(self, constrained: list[Constrained]) -> StepFill:
        """Starts computing a step's masks."""
        fill = StepFill(self, [request.request_id for request in constrained])
        self._quick.submit(self._fill, fill, constrained)
        return fill

    def close(self) -> None:
        self._quick.shutdown(wait=False, cancel_futures=True)
        for number, _ in enumerate(self._threads):
            self._queue.put(_MaskJob(-math.inf, -number))
        for thread in self._threads:
            thread.join(CLOSE_S)  # native code that returns into an interpreter during shutdown crashes it
        self._threads.clear()

    def _load(self) -> Grammars:
        with self._loading:
            if self._grammars is None:
                self._grammars = Grammars(self._directory, self._vocab_size, self._eos_token_ids)
            return self._grammars

    def _wait(self, places: list[GrammarPlace | None], patience: Patience) -> None:
        if math.isinf(patience.most_s):
            self._changed.wait_for(lambda: all(place is None or place.is_done for place in places))
        # Queued masks are slow by definition; a bounded wait does not wait for them.
        quick = [place for place in places if place is not None and not place.is_queued]
        self._changed.wait_for(lambda: all(place.is_done for place in quick), patience.most_s)
        end_s = time.monotonic() + patience.alone_s
        while patience.is_alone and not any(place is None or place.is_done for place in places):
            if time.monotonic() >= end_s or (patience.is_wanted is not None and patience.is_wanted()):
                return
            self._changed.wait(LOOK_S)

    def _collect(self, fill: StepFill, patience: Patience | None) -> StepMask:
        bits = np.full((len(fill.request_ids), self._num_words), -1, np.int32)
        mask = StepMask(bits, fill.request_ids)
        with self._changed:
            self._changed.wait_for(lambda: fill.places is not None)
            if fill.error is not None:
                raise fill.error
            places = fill.places
            assert places is not None
            start_s = time.perf_counter()
            self._wait(places, patience or PATIENT)
            mask.waited_s = time.perf_counter() - start_s
            for late in {place for place in places if place is not None and not place.is_done}:
                late.late_s = min(2.0 * late.late_s, MOST_LATE_S)
            for index, (request_id, place) in enumerate(zip(fill.request_ids, places, strict=True)):
                if place is None or place.failed:
                    logger.warning("request %s failed: its grammar can no longer be followed", request_id)
                    mask.errors[request_id] = GRAMMAR_ERROR
                elif place.bits is None:
                    mask.late[request_id] = place.late_s
                else:
                    bits[index] = place.bits
        return mask

    # ---- quick masks ----

    def _fill(self, fill: StepFill, constrained: list[Constrained]) -> None:
        try:
            quick, places = self._find(constrained)
            if quick:
                self._compute_quick(quick)
        except Exception as error:
            fill.error, places = error, []
        with self._changed:
            fill.places = places
            self._changed.notify_all()

    def _find(self, constrained: list[Constrained]) -> tuple[list[GrammarPlace], list[GrammarPlace | None]]:
        """The places of the requests, and those to compute in this thread. The others are queued."""
        outputs: list[TokenArray | None] = []
        for request in constrained:
            try:
                outputs.append(request.tokens())
            except Exception:  # the step that samples it has failed
                outputs.append(None)
        quick: list[GrammarPlace] = []
        places: list[GrammarPlace | None] = []
        with self._changed:
            for request, output in zip(constrained, outputs, strict=True):
                place = None if output is None else self._places.move(request.follower, output)
                places.append(place)
                if place is None or place.is_done or place.is_busy:
                    continue
                if _is_quick(place):
                    place.is_busy = True
                    quick.append(place)
                else:
                    self._request(place)
        return quick, places

    def _compute_quick(self, quick: list[GrammarPlace]) -> None:
        """Computes all quick masks together. If the average is too slow, each mask is timed alone next time."""
        matchers = [place.matcher for place in quick if place.matcher is not None]
        start_s = time.perf_counter()
        try:
            if self._pool is None:
                self._pool = MatcherPool(self._load(), self._num_threads)
            self._pool.consume(matchers, [int(place.output[-1]) for place in quick])
            bits, _ = self._pool.mask(matchers, self._num_words)
        except Exception:
            with self._changed:
                for place in quick:  # without this their requests would wait for ever
                    place.failed = True
                    self._places.give_back(place)
            raise
        each_s = (time.perf_counter() - start_s) / len(quick)
        with self._changed:
            for place, matcher, own in zip(quick, matchers, bits, strict=True):
                self._finish(place, matcher, own, each_s if each_s <= QUICK_S else None, int(each_s * MASK_BYTES_PER_S))

    # ---- the others ----

    def _request(self, place: GrammarPlace) -> None:
        """Queues a place if its mask is neither computed nor in progress."""
        if place.is_done or place.is_busy:
            return
        self._places.prepare(place)
        cost_s = place.grammar.cost_s
        self._put(place, COMPILE_S_PER_CHARACTER * len(place.grammar.text) if cost_s is None else cost_s)
        place.late_s = min(max(self._queued_s / self._num_threads, LEAST_LATE_S), MOST_LATE_S)
        self._start_threads()

    def _start_threads(self) -> None:
        while len(self._threads) < max(self._num_threads, 2):
            self._threads.append(threading.Thread(target=self._work, name="grammars", daemon=True))
            self._threads[-1].start()

    def _put(self, place: GrammarPlace, cost_s: float) -> None:
        place.is_busy = place.is_queued = True
        self._queued_s += cost_s
        self._num_jobs += 1
        self._queue.put(_MaskJob(time.monotonic() + WAITED_PER_S * cost_s, self._num_jobs, cost_s, place))

    def _work(self) -> None:
        pool: MatcherPool | None = None
        with contextlib.suppress(GrammarError):  # without a tokenizer no grammar compiles either
            pool = MatcherPool(self._load(), 1, NICENESS)
        while True:
            try:
                job = self._queue.get(timeout=TRIM_AFTER_S)
            except Empty:
                self._give_memory_back()
                continue
            if job.place is None:
                return
            time.sleep(REST * self._compute(job, job.place, pool))

    def _compute(self, job: _MaskJob, place: GrammarPlace, pool: MatcherPool | None) -> float:
        """Computes a place's mask, or part of the way to it. Returns the compilation's processor time, which held the
        interpreter's lock."""
        with self._changed:
            self._queued_s -= job.cost_s
            if not self._places.is_wanted(place):
                self._places.give_back(place)
                return 0.0
        bits, cost_s, compile_s = np.zeros(self._num_words, np.int32), 0.0, 0.0
        matcher, followed, begin_s = place.matcher, place.followed, time.monotonic()
        try:
            if matcher is None:
                start_s = time.thread_time()
                matcher, followed = self._load().compile(place.grammar.text), 0
                compile_s = time.thread_time() - start_s
            assert pool is not None
            while followed < len(place.output) and time.monotonic() < begin_s + SLICE_S:
                pool.consume([matcher], [int(place.output[followed])])
                followed += 1
            if followed == len(place.output):
                (bits,), cost_s = pool.mask([matcher], self._num_words)
        except Exception:
            matcher = None
        grown_bytes = int(compile_s * COMPILE_BYTES_PER_S + cost_s * MASK_BYTES_PER_S)
        with self._changed:
            if matcher is None or followed == len(place.output):
                self._finish(place, matcher, bits, cost_s, grown_bytes)
            else:
                self._places.give_back(place, matcher, followed, grown_bytes)
                self._put(place, time.monotonic() - begin_s)
        return compile_s

    def _finish(
        self, place: GrammarPlace, matcher: LLMatcher | None, bits: Bits, cost_s: float | None, grown_bytes: int
    ) -> None:
        """Records the result of a mask. Library messages are not logged: they quote the caller's grammar.

        Args:
           cost_s: processor time of the mask; None if it is unknown.
        """
        if matcher is None or matcher.is_error() or not bits.any():
            place.failed, matcher = True, None
        else:
            place.bits = bits
            place.grammar.took(cost_s)
        self._places.give_back(place, matcher, len(place.output), grown_bytes)
        self._changed.notify_all()

    def _give_memory_back(self) -> None:
        """Returns freed memory to the system; the allocator keeps it in one pool per thread."""
        with self._changed:
            if self._places.dropped_bytes < TRIM_BYTES:
                return
            self._places.dropped_bytes = 0
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)


def _is_quick(place: GrammarPlace) -> bool:
    """Whether the matcher lacks only the last token, and the grammar's masks are quick."""
    cost_s = place.grammar.cost_s
    is_known = cost_s is not None and cost_s <= QUICK_S
    return is_known and place.matcher is not None and place.followed == len(place.output) - 1

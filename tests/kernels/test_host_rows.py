"""Copies to and from host memory beside the device's work: content and order, as if each were made at once."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neaptide.kernels import host_rows
from neaptide.kernels.host_rows import HostRows, Transfer, _Streams
from tests.patience import PATIENCE_S

BLOCKS, ROWS, WIDTH = 5, 4, 3
CPU = torch.device("cpu")
Pairs = list[tuple[int, int]]


class LateFuture(Future[Any]):
    """Begins when it is waited for, after those before it."""

    def __init__(self, thread: "LateThread") -> None:
        super().__init__()
        self._thread = thread

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self._thread.run()
        return super().result(0)


class LateThread(Executor):
    """Makes one copy at each ``run``."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[LateFuture, Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> LateFuture:
        future = LateFuture(self)
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        if self.waiting:
            future, work = self.waiting.popleft()
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)


class Bench:
    """A device with ``BLOCKS`` blocks, and ``ROWS`` rows of host memory; its copies are made late."""

    def __init__(self) -> None:
        self.cache = torch.arange(BLOCKS * WIDTH).reshape(BLOCKS, WIDTH)
        self.thread = LateThread()
        self.host = HostRows(ROWS, (WIDTH,), torch.int64, CPU, thread=self.thread)
        self.host.rows.zero_()

    def save(self, copies: Pairs) -> list[Transfer]:
        blocks, rows = np.array(copies).T
        return self.host.save(rows, lambda piece: self.gather(torch.tensor(blocks[piece])))

    def load(self, copies: Pairs) -> None:
        rows, blocks = np.array(copies).T
        self.host.load(rows, lambda piece, loaded: self.scatter(torch.tensor(blocks[piece]), loaded))

    def gather(self, blocks: Tensor) -> Tensor:
        return self.cache[blocks]

    def scatter(self, blocks: Tensor, loaded: Tensor) -> None:
        self.cache[blocks] = loaded

    def write(self, block: int, value: int) -> None:
        self.cache[block] = value

    def run(self, number: int) -> None:
        """Goes on with copies; where there is a choice, ``number`` makes it."""
        self.thread.run()

    def finish(self) -> None:
        while self.thread.waiting:
            self.thread.run()


class FakeEvent:
    """A place in a stream."""

    def record(self, stream: "FakeStream") -> None:
        self.stream, self.place = stream, stream.num_done + len(stream.works)

    def query(self) -> bool:
        return self.stream.num_done >= self.place

    def synchronize(self) -> None:
        while not self.query():
            self.stream.run()


class FakeStream:
    """Work in order. It runs when it is told, or when an event that waits for it must come."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.works: deque[Callable[[], object]] = deque()
        self.num_done = 0

    def wait_event(self, event: FakeEvent) -> None:
        self.works.append(event.synchronize)

    def wait_stream(self, stream: "FakeStream") -> None:
        event = FakeEvent()
        event.record(stream)
        self.wait_event(event)

    def run(self) -> None:
        self.works[0]()
        self.works.popleft()
        self.num_done += 1

    def synchronize(self) -> None:
        while self.works:
            self.run()


class StreamBench(Bench):
    """``Bench`` with the streams of CUDA: works of different streams run in any order that events allow."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.compute = self.current = FakeStream()
        for name, fake in {"Stream": FakeStream, "Event": FakeEvent, "stream": self.on}.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        copy = torch.Tensor.copy_
        patch.setattr(
            torch.Tensor,
            "copy_",
            lambda target, source, non_blocking: self.current.works.append(lambda: copy(target, source)),
        )
        self.copier = self.host._copier = _Streams(self.host.rows, CPU)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.compute

    def gather(self, blocks: Tensor) -> Tensor:
        staged = torch.full((len(blocks), WIDTH), -1)
        self.compute.works.append(lambda: staged.index_copy_(0, torch.arange(len(blocks)), self.cache[blocks]))
        return staged

    def scatter(self, blocks: Tensor, loaded: Tensor) -> None:
        self.compute.works.append(lambda: self.cache.index_copy_(0, blocks, loaded))

    def write(self, block: int, value: int) -> None:
        self.compute.works.append(lambda: self.cache[block].fill_(value))

    @property
    def streams(self) -> list[Any]:
        return [self.compute, self.copier._out, self.copier._in]

    def run(self, number: int) -> None:
        works = [stream for stream in self.streams if stream.works]
        if works:
            works[number % len(works)].run()

    def finish(self) -> None:
        for stream in reversed(self.streams):
            stream.synchronize()


def filled(value: int) -> Tensor:
    return torch.full((WIDTH,), value)


# ---- order ----


def test_a_save_has_what_stood_there_before_the_step_wrote() -> None:
    bench = Bench()
    bench.write(1, 7)
    bench.save([(1, 2)])
    bench.write(1, 8)
    bench.finish()
    assert torch.equal(bench.host.rows[2], filled(7))


def test_a_load_has_what_an_unfinished_save_of_its_row_saves() -> None:
    bench = Bench()
    bench.write(1, 7)
    bench.save([(1, 2)])
    bench.load([(2, 3)])
    assert torch.equal(bench.cache[3], filled(7))


def test_of_two_saves_to_a_row_the_later_one_counts() -> None:
    bench = Bench()
    for value in (7, 8):
        bench.write(1, value)
        bench.save([(1, 2)])
    bench.load([(2, 3)])
    assert torch.equal(bench.cache[3], filled(8))


def test_a_load_comes_before_a_later_save_to_its_row() -> None:
    bench = Bench()
    bench.write(0, 7)
    bench.save([(0, 2)])
    bench.load([(2, 3)])
    bench.write(1, 8)
    bench.save([(1, 2)])
    bench.finish()
    assert (bench.cache[3, 0], bench.host.rows[2, 0]) == (7, 8)


def test_a_load_waits_for_the_last_save_of_its_rows_and_for_no_later_one() -> None:
    bench = Bench()
    expected = bench.cache.clone()
    bench.load([(3, 4)])
    for row in (0, 1, 2):
        bench.save([(row, row)])
    bench.load([(3, 4)])
    assert len(bench.thread.waiting) == 3
    bench.load([(0, 3), (1, 4)])
    assert len(bench.thread.waiting) == 1
    assert torch.equal(bench.cache[3:], expected[:2])


ROW_PAIRS = st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, ROWS - 1)), min_size=1, max_size=4)
OPERATIONS = st.one_of(
    st.tuples(st.just("save"), ROW_PAIRS),
    st.tuples(st.just("load"), ROW_PAIRS),
    st.tuples(st.just("write"), st.integers(0, BLOCKS - 1)),
    st.tuples(st.just("run"), st.integers(0, 5)),
)


def check_against_copies_at_once(bench: Bench, operations: list[tuple[str, Any]]) -> None:
    cache, host = bench.cache.clone(), bench.host.rows.clone()
    for number, (name, what) in enumerate(operations):
        if name == "run":
            bench.run(what)
        elif name == "write":
            cache[what] = 100 + number
            bench.write(what, 100 + number)
        elif name == "save":
            blocks, rows = zip(*{row: (block, row) for block, row in what}.values(), strict=True)
            host[list(rows)] = cache[list(blocks)]
            bench.save(list(zip(blocks, rows, strict=True)))
        else:
            blocks, rows = zip(*{block: (block, row) for block, row in what}.values(), strict=True)
            cache[list(blocks)] = host[list(rows)]
            bench.load(list(zip(rows, blocks, strict=True)))
    bench.finish()
    assert torch.equal(bench.cache, cache)
    assert torch.equal(bench.host.rows, host)


@pytest.mark.parametrize("has_streams", [False, True])
@given(st.lists(OPERATIONS, max_size=25), st.sampled_from([1, 2]), st.sampled_from([1, 2, 100]))
@settings(max_examples=60)
def test_any_sequence_is_as_if_copied_at_once(
    has_streams: bool, operations: list[tuple[str, Any]], piece_rows: int, most_pieces: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_rows, "PIECE_BYTES", piece_rows * WIDTH * 8)
        patch.setattr(host_rows, "STAGED_BYTES", most_pieces * piece_rows * WIDTH * 8)
        check_against_copies_at_once(StreamBench(patch) if has_streams else Bench(), operations)


def test_neighbours_are_copied_to_pinned_memory_at_once() -> None:
    rows = np.array([4, 5, 6, 9, 8, 0, 1])
    assert list(host_rows._runs(rows)) == [(0, 4, 3), (3, 9, 1), (4, 8, 1), (5, 0, 2)]


# ---- limits, errors, the end ----


def test_what_is_staged_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows, "PIECE_BYTES", WIDTH * 8)
    monkeypatch.setattr(host_rows, "STAGED_BYTES", 2 * WIDTH * 8)
    bench = Bench()
    expected = bench.cache.clone()
    transfers = bench.save([(0, 0), (1, 1), (2, 2)])
    assert [transfer.done() for transfer in transfers] == [True, False, False]
    bench.save([(3, 3)])
    assert [transfer.done() for transfer in transfers] == [True, True, False]
    bench.finish()
    assert torch.equal(bench.host.rows, expected[:ROWS])


def test_what_streams_stage_is_bounded_loads_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows, "PIECE_BYTES", WIDTH * 8)
    monkeypatch.setattr(host_rows, "STAGED_BYTES", 2 * WIDTH * 8)
    bench = StreamBench(monkeypatch)
    bench.load([(0, 0), (1, 1)])
    assert bench.compute.num_done == 0
    bench.load([(2, 2)])
    assert bench.compute.num_done == 2, "the first piece has been received and written"
    bench.finish()


def test_a_failed_copy_raises_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(host_rows, "_bytes_of", lambda rows: 1 / 0)
    (transfer,) = bench.save([(0, 0)])
    with pytest.raises(ZeroDivisionError):
        bench.load([(0, 1)])
    monkeypatch.undo()
    assert bench.cache[1, 0] == WIDTH, "nothing was written"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            transfer.result()
    bench.save([(2, 0)])
    bench.load([(0, 1)])
    assert torch.equal(bench.cache[1], bench.cache[2])


def test_the_end_waits_for_the_running_copy_and_drops_the_queued_ones() -> None:
    thread, running, gate = ThreadPoolExecutor(1), threading.Event(), threading.Event()
    host = HostRows(ROWS, (WIDTH,), torch.int64, CPU, thread=thread)
    held = thread.submit(lambda: running.set() or gate.wait(PATIENCE_S))
    assert running.wait(PATIENCE_S)
    (transfer,) = host.save(np.array([0]), lambda piece: torch.ones(1, WIDTH, dtype=torch.int64))
    assert isinstance(transfer, Future)
    transfer.add_done_callback(lambda _: gate.set())
    host.close()
    assert (held.done(), transfer.cancelled()) == (True, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device() -> None:
    device = torch.device("cuda")
    cache = torch.arange(8.0, device=device).repeat(1 << 20, 1).t().contiguous()
    host = HostRows(8, (1 << 20,), torch.float32, device)
    blocks = torch.arange(8, device=device)
    for _ in range(10):
        saves = host.save(np.arange(8)[::-1], lambda piece: cache.index_select(0, blocks[piece]))
        cache.fill_(-1.0)
        host.load(np.arange(8)[::-1], lambda piece, loaded: cache.index_copy_(0, blocks[piece], loaded))
    for save in saves:
        save.result()
    assert cache[:, 0].tolist() == cache[:, -1].tolist() == [float(block) for block in range(8)]
    assert torch.equal(host.rows.flip(0), cache.cpu())
    host.close()

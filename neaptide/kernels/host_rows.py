"""Rows of KV in host memory, and copies to and from them that run while the device computes."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neaptide.kernels.transfer import to_device

IntArray = npt.NDArray[np.int64]

PIECE_BYTES = 8 << 20
"""Most bytes of one staging tensor, unless one row is larger. The C library reuses memory of this size. Larger tensors
would be new pages each time, which cost more than the copy."""
STAGED_BYTES = 256 << 20
"""Most bytes of staging tensors in flight. The engine's thread waits before it stages more."""


class Transfer(Protocol):
    """A copy that may still run."""

    def done(self) -> bool: ...

    def result(self) -> object:
        """Waits for the end of the copy, and raises its error."""
        ...


class _InFlight(NamedTuple):
    number: int
    transfer: Transfer


class HostRows:
    """Rows of KV in host memory, [num_rows, *row], which one thread asks to save and load.

    A save gathers rows into a staging tensor in the device's current work. The way from there to host memory runs while
    the step computes, which may overwrite what it has saved. A load is part of the step: the device's later work waits
    for it. The load itself waits for the last save of its rows, and so for those before that one. Contents are as if
    each call had copied everything at once.

    On CUDA, copies run on two streams of their own, one for each direction. On a CPU a thread makes saves, and loads
    run at once.

    Args:
        num_rows: rows in host memory.
        row: shape of a row.
        dtype: of the rows.
        device: of the staging tensors.
        thread: runs saves one by one, in order; None for a thread of its own. Not used on CUDA.
    """

    def __init__(
        self,
        num_rows: int,
        row: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        thread: Executor | None = None,
    ) -> None:
        self.rows = torch.empty((num_rows, *row), dtype=dtype, pin_memory=device.type == "cuda")
        row_bytes = math.prod(row) * dtype.itemsize
        self._piece_rows = max(1, PIECE_BYTES // row_bytes)
        self._max_pieces = max(1, STAGED_BYTES // (self._piece_rows * row_bytes))
        self._copier: _Streams | _Thread
        if device.type == "cuda":
            self._copier = _Streams(self.rows, device)
        else:
            self._copier = _Thread(self.rows, device, thread or ThreadPoolExecutor(1, "kv-copies"))
        self._in_flight: deque[_InFlight] = deque()
        """Oldest first."""
        self._num_pieces = 0
        self._last_save = np.full(num_rows, -1)
        """[num_rows] Number of the piece that saved the row last."""

    def save(self, rows: IntArray, gather: Callable[[slice], Tensor]) -> list[Transfer]:
        """Copies rows of the device to host memory. Returns once they are staged, in the order of the device's work.

        Args:
            rows: [n] distinct rows of host memory.
            gather: stages the rows of the device for a slice of ``rows``, [length of the slice, *row], contiguous.

        Returns:
            The copies. Host memory has the rows once all are done; a failed copy leaves its rows undefined.
        """
        transfers = []
        for piece in self._pieces(len(rows)):
            transfer = self._copier.to_host(gather(piece), rows[piece])
            self._last_save[rows[piece]] = self._add(transfer)
            transfers.append(transfer)
        return transfers

    def load(self, rows: IntArray, scatter: Callable[[slice, Tensor], None]) -> None:
        """Copies rows of host memory to the device, before the device's later work.

        Args:
            rows: [n] rows of host memory.
            scatter: writes the rows of a slice of ``rows`` to their places, from [length of the slice, *row].

        Raises:
            Exception: a save that these rows wait for has failed.
        """
        for piece in self._pieces(len(rows)):
            saved = self._last_save[rows[piece]].max()
            before = next((each.transfer for each in self._in_flight if each.number == saved), None)
            scatter(piece, self._copier.from_host(rows[piece], before))
            self._add(self._copier.note())

    def close(self) -> None:
        """Drops copies that have not begun and waits for the others. Nothing can be saved afterwards."""
        self._copier.close()

    def _pieces(self, num_rows: int) -> Iterator[slice]:
        """Slices of the rows that are staged at once. Each waits until the staging tensors in flight leave room."""
        in_flight = self._in_flight
        for start in range(0, num_rows, self._piece_rows):
            while in_flight and (in_flight[0].transfer.done() or len(in_flight) >= self._max_pieces):
                with suppress(Exception):  # the step that made the copy raises its error
                    in_flight.popleft().transfer.result()
            yield slice(start, min(start + self._piece_rows, num_rows))

    def _add(self, transfer: Transfer) -> int:
        self._num_pieces += 1
        self._in_flight.append(_InFlight(self._num_pieces, transfer))
        return self._num_pieces


class _Thread:
    """Saves by a thread, loads at once."""

    def __init__(self, host: Tensor, device: torch.device, thread: Executor) -> None:
        self._host, self._device, self._thread = host, device, thread

    def to_host(self, staged: Tensor, rows: IntArray) -> Transfer:
        return self._thread.submit(self._write, staged.cpu(), rows)

    def from_host(self, rows: IntArray, before: Transfer | None) -> Tensor:
        if before is not None:
            before.result()
        return to_device(self._host.index_select(0, torch.from_numpy(rows)), self._device)

    def note(self) -> Transfer:
        """The end of all loads so far."""
        loaded: Future[None] = Future()
        loaded.set_result(None)
        return loaded

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _write(self, staged: Tensor, rows: IntArray) -> None:
        # numpy copies with one thread and without the interpreter's lock. torch would start a second set of threads
        # beside those that compute.
        _bytes_of(self._host)[rows] = _bytes_of(staged)


def _bytes_of(rows: Tensor) -> npt.NDArray[np.uint8]:
    """[rows, bytes of a row], the same memory."""
    found: npt.NDArray[np.uint8] = rows.flatten(1).view(torch.uint8).numpy()
    return found


class _Event:
    """A copy on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def result(self) -> None:
        self.event.synchronize()


class _Streams:
    """Saves on one stream, loads on another. Host memory is pinned, so the host waits for neither.

    A save needs no wait for earlier loads of its rows: it begins after its gathering, which the device does after it
    has received them.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._host, self._device = host, device
        self._out: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, staged: Tensor, rows: IntArray) -> _Event:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            for start, first, count in _runs(rows):
                self._host[first : first + count].copy_(staged[start : start + count], non_blocking=True)
        staged.record_stream(self._out)
        return _Event(self._out)

    def from_host(self, rows: IntArray, before: Transfer | None) -> Tensor:
        if isinstance(before, _Event):
            self._in.wait_event(before.event)
        with torch.cuda.stream(self._in):  # its memory, for which it need not wait for the device's other work
            staged = torch.empty((len(rows), *self._host.shape[1:]), dtype=self._host.dtype, device=self._device)
            for start, first, count in _runs(rows):
                staged[start : start + count].copy_(self._host[first : first + count], non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._in)
        staged.record_stream(current)
        return staged

    def note(self) -> _Event:
        """The end of all loads so far."""
        return _Event(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


def _runs(rows: IntArray) -> Iterator[tuple[int, int, int]]:
    """Consecutive rows: index of the first, the first, and their count."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    counts = np.diff(starts, append=len(rows))
    yield from zip(starts.tolist(), rows[starts].tolist(), counts.tolist(), strict=True)

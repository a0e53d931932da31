"""Calls C kernels, and records the calls (``recording.c`` replays them)."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neaptide.kernels.native import load_library

SOURCE = Path(__file__).with_name("recording.c")
_FIRST = ctypes.c_int64 * 4


class _Call(ctypes.Structure):
    """``call_t`` of the C source."""

    _fields_ = [("run", ctypes.c_void_p), ("job", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("first", _FIRST)]


class CallRecording:
    """Recorded calls with all the memory that they point to.

    Torch operations in between are not recorded, so a recording must be tried on other inputs.

    Args:
        max_rows: most rows per replay; buffers have this many rows.

    Raises:
        CompileError: the source does not compile here.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        library = load_library(SOURCE)
        library.neaptide_recording_call_bytes.restype = ctypes.c_int64
        assert library.neaptide_recording_call_bytes() == ctypes.sizeof(_Call)
        self._replay = library.neaptide_replay
        self._replay.restype = ctypes.c_int64
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._replay.argtypes = [pointer, integer, pointer, integer, pointer, integer]
        self._noted: list[_Call] = []
        self._calls = (_Call * 0)()
        self._kept: list[object] = []
        self._buffers: list[Tensor] = []
        self._next_buffer = 0
        self._scratch = torch.empty(0)

    def __len__(self) -> int:
        """Number of recorded calls."""
        return len(self._noted)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Records this thread's calls after those recorded before."""
        token = _recording.set(self)
        try:
            yield
        finally:
            _recording.reset(token)
            self._calls = (_Call * len(self._noted))(*self._noted)

    def begin_layer(self) -> None:
        """Lets the next layer reuse the buffers of the layers before. Tensors kept by the caller are not reused."""
        self._next_buffer = 0

    def replay(
        self, step_job: ctypes.Structure, num_rows: int, counts: int | None = None, looking_share: float = 0.0
    ) -> bool:
        """Replays the calls on the first rows of their buffers.

        Args:
            step_job: for the calls that use a job of the step.
            num_rows: for the other calls, whatever it was when they were recorded.
            counts: address of two ``int64`` that another thread writes. The replay stops before a call once the first
                is larger than the second.
            looking_share: fraction of the calls that check ``counts``.

        Returns:
            Whether all calls were made.

        Raises:
            ValueError: the buffers are too small for ``num_rows``. Nothing has been computed.
        """
        if not 0 < num_rows <= self.max_rows:
            raise ValueError(f"{num_rows} rows of {self.max_rows}")
        calls, looking = self._calls, 0 if counts is None else round(looking_share * len(self._calls))
        return bool(self._replay(calls, len(calls), ctypes.addressof(step_job), num_rows, counts, looking))

    def note(
        self, function: Callable[..., None], job: ctypes.Structure, tensors: Sequence[Tensor], *, rows: str | None
    ) -> None:
        """Records one call before it is made."""
        self._kept.extend(tensors)  # torch makes another tensor next time, but this one must stay valid
        run = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]
        if rows is None:
            self._noted.append(_Call(run, None, None, _FIRST.from_buffer_copy(job)))
            return
        own = type(job).from_buffer_copy(job)
        self._kept.append(own)
        self._noted.append(_Call(run, ctypes.addressof(own), ctypes.addressof(own) + getattr(type(job), rows).offset))

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, the first rows of ``max_rows``. It belongs to the layer until the next one
        begins."""
        all_rows = torch.Size((self.max_rows, *shape[1:]))
        if self._next_buffer < len(self._buffers):
            found = self._buffers[self._next_buffer]
            if found.shape == all_rows and found.dtype == dtype:
                self._next_buffer += 1
                return found[: shape[0]]
        made = torch.empty(all_rows, dtype=dtype)
        self._kept.append(made)
        self._buffers[self._next_buffer : self._next_buffer + 1] = [made]
        self._next_buffer += 1
        return made[: shape[0]]

    def scratch(self, floats_each: int) -> Tensor:
        """Uninitialised memory, at least ``floats_each`` per row, valid for one call."""
        floats = self.max_rows * floats_each
        if self._scratch.numel() < floats:
            self._scratch = torch.empty(floats)
            self._kept.append(self._scratch)
        return self._scratch


_recording: ContextVar[CallRecording | None] = ContextVar("recording", default=None)


def call(function: Callable[[Any], None], job: ctypes.Structure, *tensors: Tensor, rows: str | None = "rows") -> None:
    """Runs a kernel, and records the call if recording is on.

    Args:
        function: of a C library.
        job: its argument. Memory that it points to, other than ``tensors`` and ``scratch``, must stay valid.
        tensors: that the job points to.
        rows: the job's field with the number of rows, which is all that differs between steps. None: each step has a
            job of its own, whose first four fields differ by layer.
    """
    recording = _recording.get()
    if recording is not None:
        recording.note(function, job, tensors, rows=rows)
    function(ctypes.byref(job))


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor for a kernel's result."""
    recording = _recording.get()
    return torch.empty(shape, dtype=dtype) if recording is None else recording.buffer(shape, dtype)


def scratch(num_rows: int, floats_each: int) -> Tensor:
    """Uninitialised memory for a kernel's intermediate values."""
    recording = _recording.get()
    return torch.empty(num_rows * floats_each) if recording is None else recording.scratch(floats_each)

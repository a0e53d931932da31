"""Process that checks batch files. It keeps the work off the event loop, and a file may crash it without other harm.

``python -m neaptide.server.batches.checking.worker`` reads its tasks from standard input and writes its findings to
standard output. Both are frames: a length (4 bytes, big-endian) and msgpack. The first frame is the recipe of the line
compiler. The worker reports after each slice and waits for permission to continue. It runs at low priority and with
bounded memory.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from neaptide.server.batches.checking.job_files import remove_plan
from neaptide.server.batches.checking.validate import Check, CheckerDiedError, CheckReport, Keep, Validator
from neaptide.server.batches.lines import LineCompiler, Recipe
from neaptide.server.batches.storing.models import NewLine
from neaptide.server.engine_client.deaths import was_killed_from_outside
from neaptide.server.http.errors import UnavailableError
from neaptide.server.http.fair_queue import FairQueue
from neaptide.server.subprocesses.child import bound_memory, pipes, set_idle_priority
from neaptide.server.subprocesses.frames import read_frame, write_frame
from neaptide.server.subprocesses.on_call import Child, ChildDiedError

NICENESS = 10
MEMORY_BYTES = 2 << 30
"""Memory limit of the worker; a file that needs more fails its batch. A line of 32 MiB of JSON may become 1 GiB of
objects."""
IDLE_S = 60.0
"""Time for which a worker waits for the next file; starting one takes a second."""
MAX_SILENCE_S = 1800.0
"""Longest duration of one slice: its last line may be long, and the machine busy."""
SLICE_S = 0.25
"""Length of a slice. Other keys' files wait for as long, and each slice costs a message to the server and back."""
MAX_TURN_S = 2.0
"""Time after which the next key's slice begins although the last line of this one still runs."""
MAX_WORKERS = 8
"""Number of keys whose files are checked in turns; more wait for one of these files to end. Each worker has 60 MB."""
_GO_ON = b"go on"


class _Lines(msgspec.Struct, tag=True):
    lines: list[NewLine]


class _Paused(msgspec.Struct, tag=True):
    """The slice is over. A process that is ready for its first file sends this too."""


class _Done(msgspec.Struct, tag=True):
    report: CheckReport


class _DiskFault(msgspec.Struct, tag=True):
    errno: int
    message: str


class _Busy(msgspec.Struct, tag=True):
    message: str


class _Bug(msgspec.Struct, tag=True):
    kind: str


RecipeT = TypeVar("RecipeT", bound=msgspec.Struct)
_encoder = msgspec.msgpack.Encoder()
_check_decoder = msgspec.msgpack.Decoder(Check)
_Word = _Lines | _Paused | _Done | _DiskFault | _Busy | _Bug
_decoder: msgspec.msgpack.Decoder[_Word] = msgspec.msgpack.Decoder(_Word)


# ---- the server's side -----------------------------------------------------------------------------------


class ValidationError(Exception):
    """The check of one file failed by our own fault. The text names the error and quotes nothing of the file."""


Turn = Callable[[], AbstractAsyncContextManager[None]]
"""Context of one slice of a check."""


class WorkerChecker:
    """Implements ``Checker`` with one worker process, started when there is a file to check. One check at a time; event
    loop only.

    ``recipe`` makes the line compiler inside the worker; ``module`` is the program that calls ``main``.
    """

    def __init__(self, recipe: msgspec.Struct, idle_s: float = IDLE_S, module: str = __name__) -> None:
        self._child = Child(module, _encoder.encode(recipe), idle_s)

    @property
    def pid(self) -> int | None:
        """The worker's process, while there is one."""
        return self._child.pid

    async def check(self, check: Check, keep: Keep, turn: Turn = nullcontext) -> CheckReport:
        """Checks a file. Raises CheckerDiedError, UnavailableError, OSError and ValidationError. An early end of the
        check ends the worker too."""
        try:
            if await self._child.wake():
                await self._receive()
            report = await self._talk(check, keep, turn)
        except BaseException:
            await self.close()
            remove_plan(Path(check.stem))
            raise
        self._child.rest()
        return report

    async def close(self) -> None:
        """Kills the worker and waits for its end."""
        await self._child.close()

    async def _talk(self, check: Check, keep: Keep, turn: Turn) -> CheckReport:
        word = _encoder.encode(check)
        while True:
            lines: list[NewLine] = []
            async with turn():
                self._child.send(word)
                slice_ = asyncio.ensure_future(self._slice(lines))
                try:
                    await asyncio.wait({slice_}, timeout=MAX_TURN_S)
                except BaseException:
                    slice_.cancel()
                    raise
            report = await slice_
            if lines:
                await keep(lines)
            if report is not None:
                return report
            word = _GO_ON

    async def _slice(self, lines: list[NewLine]) -> CheckReport | None:
        """Collects the lines of one slice; returns the report if it was the last one."""
        while True:
            match await self._receive():
                case _Lines(more):
                    lines += more
                case _Paused():
                    return None
                case _Done(report):
                    return report
                case _DiskFault(errno, message):
                    raise OSError(errno, message)
                case _Busy(message):
                    raise UnavailableError(message)
                case _Bug(kind):
                    raise ValidationError(kind)

    async def _receive(self) -> _Word:
        """Receives a message. Raises CheckerDiedError."""
        try:
            return _decoder.decode(await self._child.receive(MAX_SILENCE_S))
        except ChildDiedError as error:
            raise CheckerDiedError(
                f"the process that checked the file ended with status {error.status}",
                by_itself=not was_killed_from_outside(error.status),
            ) from None
        except TimeoutError:
            raise CheckerDiedError("the process that checked the file fell silent") from None


class CheckerPool:
    """Implements ``Checker`` with a worker process for each key that has a file to check, which take turns: one works
    at a time. A file that kills its process, or is cancelled, ends no other key's check. Event loop only.

    Args:
        make: makes a worker's side.
        weight: of a share, as for ``FairQueue``.
    """

    def __init__(self, make: Callable[[], WorkerChecker], weight: Callable[[str], float] = lambda _: 1.0) -> None:
        self._make = make
        self._turns = FairQueue(weight)
        self._slots = asyncio.Semaphore(MAX_WORKERS)
        self._idle: list[WorkerChecker] = []
        self._all: list[WorkerChecker] = []

    async def check(self, check: Check, keep: Keep) -> CheckReport:
        """As ``WorkerChecker.check``."""
        async with self._slots:
            worker = self._idle.pop() if self._idle else self._add()
            try:
                return await worker.check(check, keep, lambda: self._turns.turn(check.share))
            finally:
                self._idle.append(worker)

    async def close(self) -> None:
        """Kills the workers and waits for their ends."""
        await asyncio.gather(*(worker.close() for worker in self._all))

    def _add(self) -> WorkerChecker:
        worker = self._make()
        self._all.append(worker)
        return worker


# ---- the worker's side -----------------------------------------------------------------------------------


def main(make_compiler: Callable[[Recipe], LineCompiler] = Recipe.compiler) -> None:
    """The worker of a server that runs lines by their tokens."""
    serve(msgspec.msgpack.Decoder(Recipe), make_compiler)


def serve(recipes: "msgspec.msgpack.Decoder[RecipeT]", make_compiler: Callable[[RecipeT], LineCompiler]) -> None:
    """Checks one file after another until its input ends."""
    set_idle_priority(NICENESS)
    source, sink = pipes()
    compiler = make_compiler(recipes.decode(read_frame(source) or b""))
    bound_memory(MEMORY_BYTES)
    _write(sink, _Paused())
    while frame := read_frame(source):
        _check(_check_decoder.decode(frame), compiler, sink, _Slices(source, sink))


class _Slices:
    """Pauses at the end of a slice; called between lines."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source, self._sink = source, sink
        self._end_s = time.monotonic() + SLICE_S

    def __call__(self) -> None:
        if time.monotonic() < self._end_s:
            return
        _write(self._sink, _Paused())
        if read_frame(self._source) is None:
            raise SystemExit("the server is gone")
        self._end_s = time.monotonic() + SLICE_S


def _check(check: Check, compiler: LineCompiler, sink: BinaryIO, pause: Callable[[], None] = lambda: None) -> None:
    def keep(lines: Sequence[NewLine]) -> None:
        _write(sink, _Lines(list(lines)))

    try:
        _write(sink, _Done(Validator(check, compiler, keep, pause).run()))
    except BrokenPipeError:
        raise SystemExit("the server is gone") from None
    except OSError as error:
        _write(sink, _DiskFault(error.errno or 0, error.strerror or "I/O error"))
    except UnavailableError as error:
        _write(sink, _Busy(error.message))
    except Exception as error:
        # The text says where, but not what: the message may quote the file.
        traceback.print_tb(error.__traceback__)
        _write(sink, _Bug(type(error).__name__))


def _write(sink: BinaryIO, frame: msgspec.Struct) -> None:
    write_frame(sink, _encoder.encode(frame))


if __name__ == "__main__":
    main()

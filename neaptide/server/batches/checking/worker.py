"""A process of its own for checking batch files: the event loop does not feel it, and it may die of a file.

``python -m neaptide.server.batches.checking.worker PARENT_PID`` reads what to do from its standard input and tells
what it found on its standard output: frames of a length (4 bytes, big-endian) and msgpack. The first frame is the
recipe of the line compiler. It runs at low priority, with bounded memory, and dies with its parent.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from neaptide.engine.process.parent import die_with_parent
from neaptide.server.batches.checking.job_files import remove_plan
from neaptide.server.batches.checking.validate import Check, CheckerDiedError, Keep, Report, Validator
from neaptide.server.batches.lines import LineCompiler, Recipe
from neaptide.server.batches.storing.models import NewLine
from neaptide.server.children.child import bound_memory, pipes, stand_back
from neaptide.server.children.frames import read_frame, write_frame
from neaptide.server.children.on_call import Child, ChildDiedError
from neaptide.server.edge.errors import UnavailableError
from neaptide.server.link.deaths import was_killed_from_outside

NICENESS = 10
MEMORY_BYTES = 2 << 30
"""Of the worker; a file that needs more fails its batch. A line of 32 MiB of JSON may become 1 GiB of objects."""
IDLE_S = 60.0
"""How long a worker waits for the next file; starting one takes a second."""
MAX_SILENCE_S = 1800.0
"""It speaks after every group of lines; a file of refused ones is silent to its end, on a busy machine for long."""


class _Lines(msgspec.Struct, tag=True):
    lines: list[NewLine]


class _Done(msgspec.Struct, tag=True):
    report: Report


class _DiskFault(msgspec.Struct, tag=True):
    errno: int
    message: str


class _Busy(msgspec.Struct, tag=True):
    message: str


class _Bug(msgspec.Struct, tag=True):
    kind: str


_encoder = msgspec.msgpack.Encoder()
_recipe_decoder = msgspec.msgpack.Decoder(Recipe)
_check_decoder = msgspec.msgpack.Decoder(Check)
_decoder: msgspec.msgpack.Decoder[_Lines | _Done | _DiskFault | _Busy | _Bug] = msgspec.msgpack.Decoder(
    _Lines | _Done | _DiskFault | _Busy | _Bug
)


# ---- the server's side -----------------------------------------------------------------------------------


class ValidationError(Exception):
    """The check of one file failed for a reason of ours; names it, and quotes nothing of the file."""


class WorkerChecker:
    """Implements ``Checker`` with one worker process, started when there is a file to check. Event loop only.

    ``recipe`` makes the line compiler inside the worker; ``module`` is the program that calls ``main``.
    """

    def __init__(self, recipe: Recipe, idle_s: float = IDLE_S, module: str = __name__) -> None:
        self._child = Child(module, _encoder.encode(recipe), idle_s)

    @property
    def pid(self) -> int | None:
        """The worker's, while there is one."""
        return self._child.pid

    async def check(self, check: Check, keep: Keep) -> Report:
        """Raises CheckerDiedError, UnavailableError, OSError and ValidationError; whatever ends it early ends the
        worker too."""
        try:
            await self._child.wake()
            report = await self._talk(check, keep)
        except BaseException:
            await self.close()
            remove_plan(Path(check.stem))
            raise
        self._child.rest()
        return report

    async def close(self) -> None:
        """Kills the worker and waits for its end."""
        await self._child.close()

    async def _talk(self, check: Check, keep: Keep) -> Report:
        self._child.send(_encoder.encode(check))
        while True:
            try:
                frame = _decoder.decode(await self._child.receive(MAX_SILENCE_S))
            except ChildDiedError as error:
                raise CheckerDiedError(
                    f"the process that checked the file ended with status {error.status}",
                    by_itself=not was_killed_from_outside(error.status),
                ) from None
            except TimeoutError:
                raise CheckerDiedError("the process that checked the file fell silent") from None
            match frame:
                case _Lines(lines):
                    await keep(lines)
                case _Done(report):
                    return report
                case _DiskFault(errno, message):
                    raise OSError(errno, message)
                case _Busy(message):
                    raise UnavailableError(message)
                case _Bug(kind):
                    raise ValidationError(kind)


# ---- the worker's side -----------------------------------------------------------------------------------


def main(parent_pid: int, make_compiler: Callable[[Recipe], LineCompiler] = Recipe.compiler) -> None:
    """Checks one file after another until its input ends."""
    die_with_parent(parent_pid)
    stand_back(NICENESS)
    source, sink = pipes()
    compiler = make_compiler(_recipe_decoder.decode(read_frame(source) or b""))
    bound_memory(MEMORY_BYTES)
    while frame := read_frame(source):
        _check(_check_decoder.decode(frame), compiler, sink)


def _check(check: Check, compiler: LineCompiler, sink: BinaryIO) -> None:
    def keep(lines: Sequence[NewLine]) -> None:
        _write(sink, _Lines(list(lines)))

    try:
        _write(sink, _Done(Validator(check, compiler, keep).run()))
    except BrokenPipeError:
        raise SystemExit("the server is gone") from None
    except OSError as error:
        _write(sink, _DiskFault(error.errno or 0, error.strerror or "I/O error"))
    except UnavailableError as error:
        _write(sink, _Busy(error.message))
    except Exception as error:
        # Where, not what: the message may quote the file.
        traceback.print_tb(error.__traceback__)
        _write(sink, _Bug(type(error).__name__))


def _write(sink: BinaryIO, frame: msgspec.Struct) -> None:
    write_frame(sink, _encoder.encode(frame))


if __name__ == "__main__":
    main(int(sys.argv[1]))

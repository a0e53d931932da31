"""Checks whether a grammar compiles, in a child process that is killed if it takes too much time or memory."""

import contextlib
import hashlib
import logging
import subprocess
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from neaptide.server.engine_client.deaths import was_killed_from_outside
from neaptide.server.engine_client.interpreter import Interpreter
from neaptide.server.structured.statuses import NO_GRAMMARS_STATUS
from neaptide.server.subprocesses.frames import read_frame, write_frame
from neaptide.server.subprocesses.private_directory import PrivateDirectory
from neaptide.server.subprocesses.start import child_command, child_environment

logger = logging.getLogger(__name__)

CPU_S = 0.5
"""Longest compilation. Real schemas take milliseconds. The engine compiles again, next to other requests' tokens."""
MEMORY_BYTES = 512 << 20
WALL_S = 10.0
"""Longest wait for an answer, in case the machine is so busy that the child hardly runs."""
START_S = 60.0
END_S = 5.0
"""Longest time between a child's last answer and its end."""
CAPACITY = 1024
"""Number of cached results, by content."""

TOO_LONG = "too complex: it took too much time or memory to compile"


class NoGrammarsError(Exception):
    """The model's tokenizer does not support grammars."""


class CheckerBusyError(Exception):
    """There was no answer, so nothing is known about the grammar."""


class GrammarChecker:
    """Compiles one grammar at a time in a child process that is started on demand. Thread-safe; blocks.

    Args:
        model_dir, vocab_size, eos_token_ids: as for ``neaptide.models.grammars.Grammars``.
        interpreter: the engine's, so that its version of the compiler is used.
    """

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        cpu_s: float = CPU_S,
        interpreter: Interpreter | None = None,
    ) -> None:
        self._interpreter = interpreter or Interpreter()
        self._arguments = [
            str(model_dir),
            str(vocab_size),
            ",".join(map(str, eos_token_ids)),
            str(cpu_s),
            str(MEMORY_BYTES),
        ]
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._verdicts_lock = threading.Lock()
        """Held only for moments."""
        self._lock = threading.Lock()
        """Lock of the child process, held while it compiles."""
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes], PrivateDirectory], GrammarChecker] | None = None
        self._serves_none = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None without one."""
        return None if self._child is None else self._child.pid

    def complaint(self, grammar: str) -> str:
        """The compiler's complaint about the grammar; empty if it compiles.

        Raises:
            NoGrammarsError: this model supports none.
            CheckerBusyError: there was no answer, which is not the grammar's fault.
        """
        if (known := self.known(grammar)) is not None:
            return known
        with self._lock:
            # Another thread may have checked the same grammar meanwhile.
            if (known := self.known(grammar)) is not None:
                return known
            verdict = self._ask(grammar)
            with self._verdicts_lock:
                self._verdicts[_key(grammar)] = verdict
                if len(self._verdicts) > CAPACITY:
                    self._verdicts.popitem(last=False)
            return verdict

    def known(self, grammar: str) -> str | None:
        """The cached result of ``complaint``, or None. Does not wait for a running compilation."""
        key = _key(grammar)
        with self._verdicts_lock:
            found = self._verdicts.get(key)
            if found is not None:
                self._verdicts.move_to_end(key)
            return found

    def close(self) -> None:
        """Kills the child process."""
        with self._lock:
            self._kill()

    def _ask(self, grammar: str) -> str:
        if self._serves_none:
            raise NoGrammarsError
        try:
            child = self._running()
        except OSError as error:
            logger.error("the process that compiles grammars could not be started: %s", error)
            raise CheckerBusyError from error
        assert child.stdin is not None
        assert child.stdout is not None
        was_slow = threading.Event()

        def give_up() -> None:
            was_slow.set()
            child.kill()

        watch = threading.Timer(WALL_S, give_up)
        watch.start()
        try:
            write_frame(_binary(child.stdin), grammar.encode())
            answer = read_frame(_binary(child.stdout))
        except OSError:
            answer = None
        finally:
            watch.cancel()
        if answer is not None:
            return answer.decode()
        status = self._end_of(child)
        if was_slow.is_set() or status is None or was_killed_from_outside(status):
            raise CheckerBusyError
        logger.info("a grammar exceeded the time or memory limit of its compiler")
        return TOO_LONG

    def _running(self) -> subprocess.Popen[bytes]:
        """The child process, started and ready."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._kill()
        directory = PrivateDirectory()
        try:
            child = self._child = subprocess.Popen(  # noqa: S603
                child_command(
                    "neaptide.server.structured.child", *self._arguments, executable=self._interpreter.executable
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # It may quote the caller.
                env=child_environment(self._interpreter.environment(directory.path)),
            )
        except OSError:
            directory.remove()
            raise
        self._end = weakref.finalize(self, _end, child, directory)
        assert child.stdout is not None
        watch = threading.Timer(START_S, child.kill)
        watch.start()
        is_ready = read_frame(_binary(child.stdout)) is not None
        watch.cancel()
        if not is_ready:
            self._serves_none = child.wait() == NO_GRAMMARS_STATUS
            self._kill()
            raise NoGrammarsError if self._serves_none else CheckerBusyError
        return child

    def _end_of(self, child: "subprocess.Popen[bytes]") -> int | None:
        """The exit status of a child that has stopped answering; None if it does not end."""
        try:
            return child.wait(END_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._kill()

    def _kill(self) -> None:
        if self._end is not None:
            self._end()
        self._child = self._end = None


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


def _binary(pipe: object) -> BinaryIO:
    assert hasattr(pipe, "read")
    return pipe  # type: ignore[return-value]


def _end(child: "subprocess.Popen[bytes]", directory: PrivateDirectory) -> None:
    """Removes the process, its descriptors and its files."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    directory.remove()

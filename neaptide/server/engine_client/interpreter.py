"""Python interpreter of the engine process: the server's own, or another for executors with conflicting packages.

The other one needs the executor's packages (vLLM, say), msgspec, numpy and pyzmq, and no web framework. Our own package
is not installed there. The engine process imports the code that this process runs, so that both have the same messages.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import neaptide
from neaptide.server.observe.logs import one_line
from neaptide.server.subprocesses.start import without_secrets

CHECK_TIMEOUT_S = 60.0
_CHECK = """
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python " + ".".join(map(str, sys.version_info[:2])) + ", and 3.11 or newer is needed")
import msgspec, numpy, zmq
print("can run an engine")
"""

WAITING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Environment variables for waiting compute threads, for GNU's and Intel's libraries; they work only before torch is
imported. Threads that spin for long take the cores from the API process on a small machine. Threads that sleep at once
do so at each of a step's hundreds of barriers. A decode of the 111M model by vLLM's worker with two threads took 114 to
128 ms asleep, and 28 to 41 ms with these."""


def wait_as_in_an_engine() -> None:
    """Sets ``WAITING_THREADS`` in a process that computes; the operator's values stay."""
    for name, value in WAITING_THREADS.items():
        os.environ.setdefault(name, value)


class InterpreterError(ValueError):
    """The engine cannot run on this interpreter; the message is one line for the operator."""


class Interpreter:
    """Interpreter and environment of an engine process.

    Args:
        path: path of the interpreter; None is the one that runs this.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path

    @property
    def executable(self) -> str:
        return self._path or sys.executable

    def check(self) -> None:
        """Checks the interpreter.

        Raises:
            InterpreterError: it is missing, too old, or lacks packages that every engine needs.
        """
        if self._path is None:
            return
        try:
            done = subprocess.run(  # noqa: S603
                [self._path, "-P", "-c", _CHECK],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_TIMEOUT_S,
                check=False,
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise InterpreterError(one_line(f"engine_python = {self._path!r} cannot be run: {error}")) from error
        if "can run an engine" not in done.stdout:
            reason = (done.stderr.strip() or f"it ended with status {done.returncode}").splitlines()[-1]
            raise InterpreterError(one_line(f"engine_python = {self._path!r} cannot be used: {reason}"))

    def environment(self, directory: Path) -> Mapping[str, str]:
        """Environment of an engine process; ``directory`` is private and lives as long as the process."""
        environment = WAITING_THREADS | without_secrets()
        if self._path is not None:
            # A folder with our package alone, without the packages installed next to it.
            folder = directory / "python"
            folder.mkdir(exist_ok=True)
            link = folder / "neaptide"
            if not link.is_symlink():
                link.symlink_to(Path(neaptide.__file__).parent)
            paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        return environment

"""The interpreter that the engine process runs on: this one, or another whose packages would not go with ours.

The other one has what the executor needs (vLLM, say) beside msgspec, numpy and pyzmq, and no web framework. Our own
package is not installed there: the engine process imports the very code that this process runs, so that both always
speak the same messages.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import neaptide
from neaptide.server.observe.logs import one_line

CHECK_TIMEOUT_S = 60.0
_CHECK = """
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python " + ".".join(map(str, sys.version_info[:2])) + ", and 3.11 or newer is needed")
import msgspec, numpy, zmq
print("can run an engine")
"""

WAITING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""How compute threads wait for each other, with GNU's and with Intel's library. Those that spin for long take the cores
from the API process on a small machine; those that sleep at once do so at every one of a step's hundreds of barriers. A
decode of the 111M model by vLLM's worker with two threads took 114 to 128 ms asleep, 28 to 41 ms with these. They count
only before torch is imported."""


def wait_as_in_an_engine() -> None:
    """For a process that computes itself; what the operator has set stays."""
    for name, value in WAITING_THREADS.items():
        os.environ.setdefault(name, value)


class InterpreterError(ValueError):
    """The engine cannot run on this interpreter; the message is one line for the operator."""


class Interpreter:
    """What an engine process is started with.

    Args:
        path: of the interpreter; None is the one that runs this.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = path

    @property
    def executable(self) -> str:
        return self._path or sys.executable

    def check(self) -> None:
        """
        Raises:
            InterpreterError: no interpreter, one too old, or one that lacks what every engine needs.
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
        """Of an engine process; ``directory`` is private, and lives as long as it."""
        environment = WAITING_THREADS | os.environ
        if self._path is not None:
            # A folder with our package alone: none of the others that are installed beside it.
            folder = directory / "python"
            folder.mkdir(exist_ok=True)
            link = folder / "neaptide"
            if not link.is_symlink():
                link.symlink_to(Path(neaptide.__file__).parent)
            paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        return environment

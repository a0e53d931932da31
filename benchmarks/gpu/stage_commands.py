"""Runs the commands of a stage, and kills them if the stage takes too long."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from benchmarks.common import REPOSITORY
from neaptide.engine.process.beside import beside

LIMIT_S = 570.0
"""Time limit of a stage."""


class StageCommands:
    """Runs the commands of one stage, and kills the running one when the stage has taken ``LIMIT_S``.

    Args:
        progress: called with every line of output.
        others: the commands run on another interpreter; from this one's path they get only the repository.
    """

    def __init__(self, progress: Callable[[str], None], *, others: bool = False) -> None:
        self._progress = progress
        self._end_s = time.monotonic() + LIMIT_S
        self._env = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        self._env.pop("TRITON_INTERPRET", None)  # set for dry runs of our kernels
        if others:
            self._env["PYTHONPATH"] = str(REPOSITORY)

    def __call__(self, command: Sequence[str]) -> list[str]:
        """Runs a command and passes on its output line by line; returns the lines.

        Raises:
            RuntimeError: it failed, or took too long.
        """
        lines: list[str] = []
        with subprocess.Popen(
            beside(command), env=self._env, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        ) as process:
            watch = threading.Timer(max(self._end_s - time.monotonic(), 0.0), process.kill)
            watch.start()
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                self._progress(lines[-1])
            watch.cancel()
        if process.returncode:
            is_late = time.monotonic() >= self._end_s
            reason = f"was ended after {LIMIT_S:.0f} s" if is_late else f"ended with status {process.returncode}"
            raise RuntimeError(f"{' '.join(command[1:4])} {reason}")
        return lines

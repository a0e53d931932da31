"""A command that gets SIGTERM when the process that started it ends, for whatever reason.

As a program, ``python -m neaptide.engine.process.beside PARENT_PID COMMAND ...`` becomes COMMAND.
"""

import os
import sys
from collections.abc import Sequence

from neaptide.engine.process.parent import stop_with_parent


def beside(command: Sequence[str]) -> list[str]:
    """Command line that runs ``command`` and stops it when this process ends. Start it from a thread that lives as long
    as the process."""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), *command]


if __name__ == "__main__":
    stop_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606

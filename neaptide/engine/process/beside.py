"""A command that is told to stop (SIGTERM) when the process that starts it ends, however that ends.

As a program, ``python -m neaptide.engine.process.beside PARENT_PID COMMAND ...`` becomes COMMAND.
"""

import os
import sys
from collections.abc import Sequence

from neaptide.engine.process.parent import stop_with_parent


def beside(command: Sequence[str]) -> list[str]:
    """What the thread that lives as long as this process has to start for ``command`` to end with it."""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), *command]


if __name__ == "__main__":
    stop_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606

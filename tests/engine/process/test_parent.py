"""Processes that do not outlive those that started them."""

import subprocess
import sys

import psutil

from tests.patience import PATIENCE_S

PARENT = """
import subprocess, sys
from neaptide.engine.process.beside import beside

child = subprocess.Popen(beside([sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]))
child.wait()
"""


def test_a_command_beside_a_process_that_is_killed_is_told_to_stop() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (child,) = psutil.Process(parent.pid).children()
        assert child.cmdline()[-1] == "import signal; print(flush=True); signal.pause()"
        parent.kill()
        _, alive = psutil.wait_procs([child], timeout=PATIENCE_S)
        assert not alive


def test_a_command_whose_parent_is_gone_is_not_run() -> None:
    command = [sys.executable, "-m", "neaptide.engine.process.beside", "1", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "the server process has ended\n")

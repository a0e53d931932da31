import signal
import subprocess
import sys

import psutil

from tests.kills import signal_all
from tests.patience import PATIENCE_S

PARENT = """
import subprocess, sys
from neaptide.engine.process.beside import beside

child = subprocess.Popen(beside([sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]))
child.wait()
"""


def test_a_child_that_has_followed_its_parent_already_is_no_error_and_the_next_one_is_killed() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent,
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as other,
    ):
        assert parent.stdout is not None
        parent.stdout.readline()
        family = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children()]
        assert len(family) == 2
        parent.kill()
        assert parent.wait() == -signal.SIGKILL
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive
        try:
            signal_all([*family, psutil.Process(other.pid)], signal.SIGTERM)
            assert other.wait(PATIENCE_S) == -signal.SIGTERM
        finally:
            other.kill()

"""Child processes that do not outlive their parent."""

import ctypes
import os
import signal


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends; stop signals are the parent's to act on.

    Raises:
        SystemExit: the parent is gone already.
    """
    pr_set_pdeathsig = 1
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit("the server process is gone")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

"""A child process of the API process that works for it now and then, and may die of its work."""

import asyncio
import contextlib
import os
import resource
import sys

from neaptide.server.link.frames import LENGTH, framed


class ChildDiedError(Exception):
    """The child has ended."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with status {status}")
        self.status = status


class Child:
    """``python -m MODULE PARENT_PID``, spoken to in frames; started when there is something for it to do, and ended
    when there has been nothing for a while. Event loop only.

    Args:
        hello: the first frame that it is sent; None: there is none.
        idle_s: how long it rests before it is ended.
    """

    def __init__(self, module: str, hello: bytes | None, idle_s: float) -> None:
        self._module = module
        self._hello = hello
        self._idle_s = idle_s
        self._process: asyncio.subprocess.Process | None = None
        self._retirement: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """While there is one."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def wake(self) -> None:
        """Before it is spoken to: starts it, if it does not run."""
        if self._retirement is not None:
            self._retirement.cancel()
        if self.pid is not None:
            return
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # what lies in the working directory is not ours to import
            "-m",
            self._module,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # One core is enough, and the others are not its own.
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        if self._hello is not None:
            self.send(self._hello)

    def send(self, frame: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(framed(frame))

    async def receive(self, timeout_s: float) -> bytes:
        """
        Raises:
            ChildDiedError: it has ended.
            TimeoutError: it is silent.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                return await process.stdout.readexactly(length)
        except asyncio.IncompleteReadError:
            raise ChildDiedError(await process.wait()) from None

    def rest(self) -> None:
        """It has done what it was to do."""
        self._retirement = asyncio.get_running_loop().call_later(self._idle_s, self._kill)

    async def close(self) -> None:
        """Kills it and waits for its end."""
        if self._retirement is not None:
            self._retirement.cancel()
        self._kill()
        process, self._process = self._process, None
        if process is not None:
            await process.wait()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


# ---- the child's side ------------------------------------------------------------------------------------


def bound_memory(memory_bytes: int) -> None:
    """Of this process; and where memory is short it goes before those that serve."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")


def run_when_idle() -> None:
    """From now on this process has what no other wants of the processor."""
    os.nice(19)
    with contextlib.suppress(OSError):  # where it is forbidden, the least weight must do
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

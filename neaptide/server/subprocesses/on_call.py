"""A child process of the API process that is started on demand and may crash."""

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path

from neaptide.server.subprocesses.frames import framed, receive_frame
from neaptide.server.subprocesses.start import child_environment, end_child, start_child


class ChildDiedError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"the process ended with status {status}")
        self.status = status


class Child:
    """Runs ``python -m MODULE`` and exchanges frames with it. Starts it on demand and ends it when it is idle.

    Event loop only.

    Args:
        hello: first frame that is sent to it; None sends none.
        idle_s: idle time after which it is ended.
        temporary: parent of a temporary directory of its own, removed after its end; None makes none.
    """

    def __init__(self, module: str, hello: bytes | None, idle_s: float, temporary: Path | None = None) -> None:
        self._module = module
        self._hello = hello
        self._idle_s = idle_s
        self._temporary = temporary
        self._own: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._retirement: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None if it does not run."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def wake(self) -> bool:
        """Starts the process unless it runs; returns whether it was started. Call before sending."""
        if self._retirement is not None:
            self._retirement.cancel()
        if self.pid is not None:
            return False
        self._tidy()
        environment = child_environment()
        if self._temporary is not None:
            self._own = Path(tempfile.mkdtemp(dir=self._temporary))
            environment = {**environment, "TMPDIR": str(self._own)}
        self._process = await start_child(self._module, environment=environment)
        if self._hello is not None:
            self.send(self._hello)
        return True

    def send(self, frame: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(framed(frame))

    async def receive(self, timeout_s: float) -> bytes:
        """The next frame from the process.

        Raises:
            ChildDiedError: it has ended.
            TimeoutError: it sent none in time.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                return await receive_frame(process.stdout)
        except asyncio.IncompleteReadError:
            raise ChildDiedError(await process.wait()) from None

    def rest(self) -> None:
        """Schedules the end of the idle process."""
        self._retirement = asyncio.get_running_loop().call_later(self._idle_s, self._kill)

    async def close(self) -> None:
        """Kills the process and waits for its end."""
        if self._retirement is not None:
            self._retirement.cancel()
        process, self._process = self._process, None
        if process is not None:
            await end_child(process)
        self._tidy()

    def _tidy(self) -> None:
        """Removes the temporary directory of an ended process."""
        own, self._own = self._own, None
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

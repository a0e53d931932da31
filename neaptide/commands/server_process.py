"""A Neaptide server as a subprocess, for the demo and the benchmarks."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from neaptide.engine.process.beside import beside
from neaptide.loadgen.client.proxies import mounts_for


class ServerDiedError(Exception):
    """The server ended before it was ready. The message has the end of its log."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class ServerProcess:
    """``neaptide serve`` on a free loopback port.

    It ends with the context, and with this process if that is killed. Its log and its data are in ``directory``.
    """

    def __init__(self, flags: Sequence[str], directory: Path, start_timeout_s: float = 120.0) -> None:
        self._start_timeout_s = start_timeout_s
        self._port = free_port()
        self._flags = [*flags, "--port", str(self._port), "--data-dir", str(directory / "data")]
        self._log_path = directory / "server.log"
        self._process: asyncio.subprocess.Process | None = None
        self.base_url = f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of its API process."""
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> "ServerProcess":
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when ``/ready`` answers 200.

        Raises:
            ServerDiedError: the server ended, or was not ready in time.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        command = beside([sys.executable, "-m", "neaptide", "serve", *self._flags])
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=os.environ)
        deadline_s = asyncio.get_running_loop().time() + self._start_timeout_s
        async with httpx.AsyncClient(base_url=self.base_url, mounts=mounts_for(self.base_url)) as http:
            while self._process.returncode is None and asyncio.get_running_loop().time() < deadline_s:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        await self.stop()
        raise ServerDiedError(f"the server did not become ready:\n{self._log_path.read_text()[-2000:]}")

    async def stop(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(15.0):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

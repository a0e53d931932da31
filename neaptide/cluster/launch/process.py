"""One replica as a child process: the process pair of ``neaptide serve``, on a port that the system picks."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import msgspec

from neaptide.engine.process.beside import beside
from neaptide.launch.serve import LaunchError, listen
from neaptide.server.settings import Settings
from neaptide.server.settings_sources import data_path
from neaptide.server.subprocesses.start import child_command

LAST_S = 15.0
"""Time after a drain in which results become durable and the engine ends."""

LOOK_S = 0.2
"""Interval between checks whether it is ready."""


class ReplicaProcess:
    def __init__(self, process: asyncio.subprocess.Process, url: str, drain_timeout_s: float) -> None:
        self.process = process
        self.url = url
        self._drain_timeout_s = drain_timeout_s
        self._told = asyncio.Event()
        """Set when it was sent the signal to stop."""

    @classmethod
    async def start(
        cls, settings: Settings, environment: Mapping[str, str] = os.environ, kept_fds: Sequence[int] = ()
    ) -> "ReplicaProcess":
        """Starts a replica. Returns before it is ready; its port already takes connections.

        Args:
            kept_fds: file descriptors that it keeps open, for the locks on them.

        Raises:
            LaunchError: its address is not available.
        """
        with listen(settings.host, 0) as listener:
            host, port = listener.getsockname()[:2]
            command = beside(child_command("neaptide.cluster.launch.replica", str(listener.fileno())))
            # A plain dict: the event loop of Ray's actors takes no other mapping.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, env=dict(environment), pass_fds=[listener.fileno(), *kept_fds]
            )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(msgspec.json.encode(settings))
            process.stdin.close()
        shown = f"[{host}]" if ":" in host else host
        return cls(process, f"http://{shown}:{port}", settings.drain_timeout_s)

    async def until_ready(self) -> None:
        """Waits until it takes work.

        Raises:
            LaunchError: it ended before.
        """
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as http:
            while self.process.returncode is None:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(LOOK_S)
        raise LaunchError(f"the server ended with status {self.process.returncode} before it was ready")

    @property
    def is_told(self) -> bool:
        """Whether its drain was started here."""
        return self._told.is_set()

    def stop_soon(self) -> None:
        """Starts its drain if it runs; a second call cuts the drain short."""
        if self.process.returncode is None:
            self._told.set()
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Waits for its end, and returns its exit status. After the signal to stop, the wait is limited as in
        ``stop``."""
        ended = asyncio.ensure_future(self.process.wait())
        told = asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self.stop()
            return await ended
        finally:
            told.cancel()

    async def stop(self) -> None:
        """Drains it and waits for its end; kills it if the drain takes too long."""
        if not self.is_told:
            self.stop_soon()
        try:
            async with asyncio.timeout(self._drain_timeout_s + LAST_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


def replica_settings(settings: Settings, name: str, host: str) -> Settings:
    """The settings of one replica: its own address, data directory and step log."""
    data_dir = data_path(settings.data_dir)
    step_log = settings.step_log
    if step_log is not None:
        path = Path(step_log)
        step_log = str(path.with_name(f"{name}-{path.name}"))
    return msgspec.structs.replace(settings, host=host, port=0, data_dir=str(data_dir / name), step_log=step_log)


def devices_of(number: int, count: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of replica ``number`` of ``count``. It gets its part of the GPUs in ``CUDA_VISIBLE_DEVICES``, or
    all of them if there are fewer GPUs than replicas."""
    devices = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    each = len(devices) // count
    if not each:
        return dict(environment)
    own = devices[number * each : (number + 1) * each]
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(own)}

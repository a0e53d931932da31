"""Runs other projects' servers as child processes: waits until they are ready, and ends them with all processes that
they started."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx

from benchmarks.keeper import kept
from neaptide.commands.server_process import ServerDiedError

TICK_S = 0.1


@contextlib.asynccontextmanager
async def server_process(
    command: Sequence[str], port: int, environment: Mapping[str, str], log: Path, start_timeout_s: float
) -> AsyncIterator[str]:
    """Runs a server that answers ``GET /health`` on a loopback port once it is ready; yields its address.

    Raises:
        ServerDiedError: the server ended, or was not ready in time; the message has the end of its log.
    """
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(*kept(command), stdout=file, stderr=file, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline_s = asyncio.get_running_loop().time() + start_timeout_s
        async with httpx.AsyncClient(base_url=address) as http:
            while True:
                if process.returncode is not None or asyncio.get_running_loop().time() > deadline_s:
                    raise ServerDiedError(f"{command[0]} did not become ready:\n{_end_of(log)}")
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/health")).status_code == 200:
                        break
                await asyncio.sleep(TICK_S)
        yield address
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]

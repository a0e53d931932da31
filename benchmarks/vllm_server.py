"""vLLM's own server, and ours over its workers, on equal terms: same model, machine, threads, preloaded libraries."""

import asyncio
import contextlib
import ctypes.util
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.live_coserving import START_TIMEOUT_S
from neaptide.commands.server_process import ServerDiedError, free_port


@dataclass(slots=True, frozen=True)
class Rival:
    """vLLM's own server in one configuration."""

    name: str
    flags: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Machine:
    """What both engines run on and with."""

    python: Path
    threads: int
    dtype: str
    block_size: int
    kv_gib: float | None
    """None: as much as vLLM takes by itself, which on a CPU is not the same for both."""
    is_eager: bool
    device: str
    max_model_len: int

    @property
    def environment(self) -> Mapping[str, str]:
        """The libraries that vLLM's notes on CPUs name, as far as they are here, and as many threads for both."""
        if self.device != "cpu":
            return {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        omp, tcmalloc = self.python.parent.parent / "lib" / "libiomp5.so", ctypes.util.find_library("tcmalloc_minimal")
        preloaded = ([str(omp)] if omp.exists() else []) + ([tcmalloc] if tcmalloc else [])
        return {
            "LD_PRELOAD": ":".join(preloaded),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.threads - 1}",
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    @property
    def our_flags(self) -> list[str]:
        flags = ["--executor", "vllm", "--engine-python", str(self.python), "--num-threads", str(self.threads)]
        flags += ["--executor-arg", "enforce_eager=true"] if self.is_eager else []
        flags += ["--device", self.device, "--block-size", str(self.block_size)]
        return flags if self.kv_gib is None else [*flags, "--kv-cache-gib", str(self.kv_gib)]

    @property
    def vllm_flags(self) -> list[str]:
        flags = ["--dtype", self.dtype, "--max-model-len", str(self.max_model_len)]
        flags += ["--enforce-eager"] if self.is_eager else []
        flags += ["--block-size", str(self.block_size)]
        return flags if self.kv_gib is None else [*flags, "--kv-cache-memory-bytes", str(int(self.kv_gib * 2**30))]


@contextlib.asynccontextmanager
async def vllm_server(machine: Machine, model: Path, rival: Rival, log: Path) -> AsyncIterator[str]:
    """vLLM's own server on a free loopback port; yields its address."""
    port = free_port()
    command = [str(machine.python.parent / "vllm"), "serve", str(model), "--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), *machine.vllm_flags]
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            *command, *rival.flags, stdout=file, stderr=file, env=os.environ | machine.environment
        )
    try:
        deadline_s = asyncio.get_running_loop().time() + START_TIMEOUT_S
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            while True:
                if process.returncode is not None or asyncio.get_running_loop().time() > deadline_s:
                    raise ServerDiedError(f"vLLM did not become ready:\n{_end_of(log)}")
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get("/health")).status_code == 200:
                        break
                await asyncio.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 20.0)
            except TimeoutError:
                process.kill()
                await process.wait()


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:]

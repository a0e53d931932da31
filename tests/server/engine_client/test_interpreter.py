"""The engine on another interpreter than the server's."""

import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import msgspec
import psutil
import pytest

from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.launch.serve import embedded_model_path
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.interpreter import Interpreter, InterpreterError
from neaptide.server.engine_client.supervisor import EngineStartError, Supervisor
from neaptide.server.observe.logs import one_line
from tests.patience import PATIENCE_S
from tests.server.engine_client.test_supervisor import signal_under_a_stream

NEEDED = ("msgspec", "numpy", "numpy.libs", "zmq", "pyzmq.libs")


def config(model_path: str = str(embedded_model_path())) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(num_blocks=512),
        scheduler=SchedulerConfig(max_model_len=1024),
        executor=ExecutorConfig(kind="sim", model_path=model_path),
    )


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose environment has what every engine needs, and neither our package nor a web framework."""
    directory = tmp_path_factory.mktemp("other")
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    installed = Path(msgspec.__file__).parents[1]
    for name in NEEDED:
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)
    return directory / "bin" / "python"


async def test_the_engine_runs_on_the_other_interpreter_with_our_package_and_is_restarted_there(
    other_python: Path,
) -> None:
    client = EngineClient()
    interpreter = Interpreter(str(other_python))
    interpreter.check()
    supervisor = Supervisor(client, config(), interpreter)
    try:
        assert (await supervisor.start()).num_blocks == 512
        first = supervisor.engine_pid
        assert first is not None
        assert psutil.Process(first).cmdline()[0] == str(other_python)
        assert await signal_under_a_stream(client, supervisor, signal.SIGKILL) == first
    finally:
        await supervisor.stop()


async def test_what_the_other_engine_refuses_is_told_in_one_line(other_python: Path) -> None:
    supervisor = Supervisor(EngineClient(), config("/no\nsuch\0model"), Interpreter(str(other_python)))
    try:
        with pytest.raises(EngineStartError) as refused:
            await supervisor.start()
    finally:
        await supervisor.stop()
    assert str(refused.value).isprintable()


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    with pytest.raises(InterpreterError, match=r"python' cannot be used: it ended with status 0$"):
        Interpreter(str(script)).check()


@pytest.mark.parametrize("path", ["/no/such/python", "/nul\0"])
def test_an_interpreter_that_cannot_be_run_is_refused_in_one_line(path: str) -> None:
    with pytest.raises(InterpreterError, match="cannot be run: ") as refused:
        Interpreter(path).check()
    assert str(refused.value).isprintable()


def test_an_interpreter_that_lacks_what_every_engine_needs_says_what(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    with pytest.raises(InterpreterError, match=r"cannot be used: ModuleNotFoundError: No module named 'msgspec'$"):
        Interpreter(str(tmp_path / "bin" / "python")).check()


def test_the_servers_own_interpreter_is_the_default_and_needs_no_check(tmp_path: Path) -> None:
    interpreter = Interpreter()
    interpreter.check()
    assert interpreter.executable == sys.executable
    assert not {"PYTHONPATH"} & (interpreter.environment(tmp_path).keys() - os.environ.keys())


def test_compute_threads_spin_a_little_before_they_sleep_unless_the_operator_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KMP_BLOCKTIME", "200")
    environment = Interpreter().environment(tmp_path)
    waiting = {name: environment[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    assert waiting == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "200"}


def test_one_line_is_left_of_any_text() -> None:
    assert one_line("no\n  such\tmodel \0 \x1b[31m ") == "no such model \\u0000 \\u001b[31m"


SPAWNS = """
import importlib.util, multiprocessing, sys, time
sys.modules["__main__"].__spec__ = importlib.util.find_spec("neaptide.launch.serve")
child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
child.start()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_processes_that_an_executor_starts_die_with_the_engine() -> None:
    with subprocess.Popen([sys.executable, "-c", SPAWNS], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        child = psutil.Process(int(engine.stdout.readline()))
        while _ignores_interrupts(child) is False:  # it has not yet heard whose child it is
            pass
        engine.kill()
        _, alive = psutil.wait_procs([child], timeout=PATIENCE_S)
    assert not alive


def _ignores_interrupts(process: psutil.Process) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    ignored = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(ignored >> (signal.SIGTERM - 1) & 1)

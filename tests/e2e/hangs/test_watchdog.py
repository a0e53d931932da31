"""Engines that are slow, stopped or paused with their machine: the watchdog replaces those that hang, and no other."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer, stop_for_good, stream_events, submit_batch
from tests.kills import signal_all
from tests.patience import Stopwatch

BUSY_S = float(os.environ.get("BUSY_S", "60"))
"""For how long no alarm may be false; an hour was the goal."""


def chat(max_tokens: int) -> dict[str, Any]:
    message = {"role": "user", "content": "hello"}
    return {"model": "neaptide-tiny", "messages": [message], "max_completion_tokens": max_tokens}


@pytest.mark.full
@pytest.mark.parametrize("pause_s", [1, 9, 25, 60])
def test_an_engine_that_hangs_after_a_pause_of_the_machine_is_replaced_within_twelve_seconds(
    simulated: RunningServer, pause_s: int
) -> None:
    engine = simulated.engine
    stream = stream_events(simulated, chat(7000))
    next(stream)
    both = [psutil.Process(simulated.process.pid), engine]
    signal_all(both, signal.SIGSTOP)
    time.sleep(pause_s)
    signal_all(both, signal.SIGCONT)
    for _ in range(100):  # a second of steps: nobody took the pause for a hang
        next(stream)
    assert simulated.engine == engine
    stop_for_good(simulated, stream)


@pytest.mark.full
def test_an_engine_that_was_stopped_alone_for_a_while_is_given_no_longer_silence(simulated: RunningServer) -> None:
    engine = simulated.engine
    stream = stream_events(simulated, chat(7000))
    next(stream)
    for pause_s in (1.0, 4.0, 7.0):
        engine.suspend()
        time.sleep(pause_s)
        engine.resume()
        for _ in range(30):
            next(stream)
    assert simulated.engine == engine
    stop_for_good(simulated, stream)


def slow_profile(path: Path, step_s: float) -> Path:
    """Of a device whose every step takes about so long."""
    profile = json.loads((files("neaptide.data") / "profiles" / "cpu-neaptide-tiny.json").read_text())
    for costs in profile["costs"].values():
        costs["fixed_s"] = step_s
    path.write_text(json.dumps(profile))
    return path


@contextmanager
def slow_server(path: Path, predicted_s: float, step_s: float, *flags: str) -> Iterator[RunningServer]:
    profile = slow_profile(path / "slow.json", predicted_s)
    env = SIM | {"NEAPTIDE_SIM_STEP_MS": str(step_s * 1e3)}
    slow = ["--profile", str(profile), "--ttft-slo-ms", "300000", "--tpot-slo-ms", "300000", *flags]
    with RunningServer(path / "server", *slow, env=env) as server:
        yield server


@pytest.mark.full
def test_a_step_that_is_predicted_to_take_forty_seconds_is_waited_for(tmp_path: Path) -> None:
    with slow_server(tmp_path, 40.0, 40.0) as server:
        engine = server.engine
        reply = server.http.post("/v1/chat/completions", json=chat(1), timeout=300.0)
        assert reply.status_code == 200
        assert server.engine == engine


@pytest.mark.full
def test_a_step_that_takes_longer_than_the_ceiling_is_a_hang(tmp_path: Path) -> None:
    with slow_server(tmp_path, 40.0, 600.0, "--engine-timeout-s", "12") as server:
        assert "raise engine_timeout_s or lower max_num_batched_tokens" in server.log
        watch, began_s = Stopwatch(), time.monotonic()
        reply = server.http.post("/v1/chat/completions", json=chat(1), timeout=300.0)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
        assert time.monotonic() - began_s >= 12.0
        assert watch.seconds < 16.0


@pytest.mark.full
@pytest.mark.timeout(BUSY_S + 900)
def test_a_busy_machine_is_no_hang(tmp_path: Path) -> None:
    """``BUSY_S=3600`` for an hour. Chats and a batch on the embedded model, beside two busy loops for each core."""
    with RunningServer(tmp_path) as server, ExitStack() as stack:
        engine = server.engine
        submit_batch(server, [chat(200) for _ in range(2000)])
        for _ in range(2 * (os.cpu_count() or 1)):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        end_s = time.monotonic() + BUSY_S
        while time.monotonic() < end_s:
            assert server.http.post("/v1/chat/completions", json=chat(50)).status_code == 200
        assert server.engine == engine
        assert "silent for too long" not in server.log

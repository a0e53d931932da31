"""The supervisor with a real engine process (simulated executor)."""

import asyncio
import os
import signal
import stat
from pathlib import Path

import psutil
import pytest

from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.engine.messages import AddRequest
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.server.engine_client import EngineClient, EngineUnavailableError
from neaptide.server.launch import embedded_model_path
from neaptide.server.supervisor import EngineStartError, Supervisor


def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(num_blocks=512),
        scheduler=SchedulerConfig(max_model_len=1024),
        executor=ExecutorConfig(kind="sim", model_path=str(embedded_model_path()), sim_step_s=0.01),
        request_log_path=str(tmp_path / "log"),
    )


def request(request_id: str, max_tokens: int) -> AddRequest:
    return AddRequest(request_id, [7, 8, 9], SamplingParams(max_tokens=max_tokens), Tier.DEFAULT, 0.0, 1.0, 1.0)


async def test_request_survives_to_its_end_and_the_socket_is_private(tmp_path: Path) -> None:
    client = EngineClient()
    supervisor = Supervisor(client, config(tmp_path))
    try:
        ready = await supervisor.start()
        assert ready.num_blocks == 512
        (socket,) = supervisor.directory.iterdir()
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(supervisor.directory.stat().st_mode) == 0o700
        outputs = [output async for output in client.generate(request("a", 5))]
        assert sum(len(output.new_token_ids) for output in outputs) == 5
        assert outputs[-1].finish_reason is FinishReason.LENGTH
    finally:
        await supervisor.stop()
    assert not supervisor.directory.exists()


async def test_killed_engine_ends_its_streams_and_another_takes_over(tmp_path: Path) -> None:
    client = EngineClient()
    supervisor = Supervisor(client, config(tmp_path))
    try:
        await supervisor.start()
        first = supervisor.engine_pid
        assert first is not None
        stream = client.generate(request("a", 500))
        await anext(stream)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError):
            async for _ in stream:
                pass
        await asyncio.wait_for(client.wait_ready(), 30)
        assert supervisor.engine_pid != first
        assert [o async for o in client.generate(request("b", 2))][-1].finish_reason is FinishReason.LENGTH
    finally:
        await supervisor.stop()
    assert not psutil.pid_exists(first)


async def test_engine_that_refuses_its_configuration_says_why(tmp_path: Path) -> None:
    broken = EngineConfig(executor=ExecutorConfig(kind="sim", model_path=str(tmp_path)))
    supervisor = Supervisor(EngineClient(), broken)
    try:
        with pytest.raises(EngineStartError, match=r"config\.json"):
            await supervisor.start()
    finally:
        await supervisor.stop()


async def test_failure_to_start_a_process_is_told_instead_of_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    supervisor = Supervisor(EngineClient(), config(tmp_path))
    try:
        with pytest.raises(EngineStartError, match="no more processes"):
            await asyncio.wait_for(supervisor.start(), 10)
    finally:
        await supervisor.stop()

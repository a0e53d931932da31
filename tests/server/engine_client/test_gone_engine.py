"""An engine that has gone, or has not come yet, and of which this side does not know it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from neaptide.engine.messages import AbortRequest, Shutdown
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.supervisor import Supervisor
from tests.patience import until, until_here
from tests.server.engine_client.test_supervisor import _collect, config, request, spoken_to


async def test_what_cannot_be_sent_is_not_waited_for(tmp_path: Path) -> None:
    with spoken_to(tmp_path) as (engine, theirs, _, _):
        until_here(lambda: engine.reaches(AbortRequest(["nobody"])))  # it has come
        engine.send(request("a", 3))
        assert engine._arrivals.are_on_their_way
        engine._arrivals.note_taken(request("a", 3))
        theirs.close(linger=0)
        until_here(lambda: not engine.reaches(AbortRequest(["nobody"])))
        engine.send(request("b", 3))
        assert not engine._arrivals.are_on_their_way


async def test_a_request_for_an_engine_that_has_just_gone_is_given_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.engine_client.supervisor.FIRST_BACKOFF_S", 0.0)
    client = EngineClient()
    supervisor = Supervisor(client, config(tmp_path))
    try:
        await supervisor.start()
        engine = supervisor._engine
        assert engine is not None
        os.kill(engine.process.pid, signal.SIGKILL)
        # The loop does not run, so nobody is told of it.
        until_here(lambda: not engine.reaches(AbortRequest(["nobody"])))
        collecting = asyncio.ensure_future(_collect(client, request("late", 3)))
        await asyncio.sleep(0)
        assert supervisor._engine is engine
        assert client.num_in_flight == 1
        assert len(await collecting) == 3
    finally:
        await supervisor.stop()


async def test_a_stop_does_not_wait_for_an_engine_that_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neaptide.server.engine_client.supervisor.SHUTDOWN_TIMEOUT_S", 1e6)
    supervisor = Supervisor(EngineClient(), config(tmp_path))
    starting = asyncio.ensure_future(supervisor.start())
    await until(lambda: supervisor._engine is not None)
    assert supervisor._engine is not None
    process = supervisor._engine.process
    assert not supervisor._engine.reaches(Shutdown())
    await supervisor.stop()
    assert process.returncode is not None
    assert not supervisor.directory.exists()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)

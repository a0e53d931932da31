"""The supervisor with a real engine process (simulated executor)."""

import asyncio
import contextlib
import os
import select
import signal
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import zmq

from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.engine.messages import (
    AbortRequest,
    AddRequest,
    FromEngine,
    RequestOutput,
    StepOutputs,
    from_engine_encoder,
)
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.engine.process.arrivals import OnlineArrivals, create_arrivals
from neaptide.engine.row_id import RowId
from neaptide.launch.serve import embedded_model_path
from neaptide.server.link.deaths import Evidence
from neaptide.server.link.engine_client import EngineClient, EngineUnavailableError
from neaptide.server.link.supervisor import EngineStartError, Supervisor, _Engine
from tests.server.asgi import settle
from tests.server.link.loop_clock import LoopClock

FOR_EVER_S = 1000.0
"""Of the loop's clock, which the tests turn: no engine is so slow."""


def config(tmp_path: Path, max_num_seqs: int = 256) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(num_blocks=512),
        scheduler=SchedulerConfig(max_model_len=1024, max_num_seqs=max_num_seqs),
        executor=ExecutorConfig(kind="sim", model_path=str(embedded_model_path()), sim_step_s=0.01),
        request_log_path=str(tmp_path / "log"),
    )


def request(request_id: str, max_tokens: int) -> AddRequest:
    return AddRequest(request_id, [7, 8, 9], SamplingParams(max_tokens=max_tokens), Tier.DEFAULT, 0.0, 1.0, 1.0)


async def signal_under_a_stream(
    client: EngineClient, supervisor: Supervisor, number: signal.Signals, clock: LoopClock | None = None
) -> int:
    """Signals the engine while it streams, then lets time pass if there is a clock, and waits for the next engine;
    returns the first one's process id."""
    first = supervisor.engine_pid
    assert first is not None
    stream = client.generate(request("a", 900))
    await anext(stream)
    os.kill(first, number)
    if clock is not None:
        await clock.pass_s(2 * FOR_EVER_S)
    with pytest.raises(EngineUnavailableError):
        async for _ in stream:
            pass
    await client.wait_ready()
    assert supervisor.engine_pid not in (first, None)
    return first


class Deaths:
    """A batch listener that notes what the ends of engines say."""

    def __init__(self) -> None:
        self.evidence: list[Evidence] = []

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None: ...

    def on_engine_ready(self) -> None: ...

    def on_engine_lost(self, suspects: Sequence[RowId], evidence: Evidence) -> None:
        self.evidence.append(evidence)


async def test_request_survives_to_its_end_and_the_socket_is_private(tmp_path: Path) -> None:
    client = EngineClient()
    supervisor = Supervisor(client, config(tmp_path))
    try:
        ready = await supervisor.start()
        assert ready.num_blocks == 512
        (socket,) = supervisor.directory.glob("*.sock")
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
        first = await signal_under_a_stream(client, supervisor, signal.SIGKILL)
        assert [o async for o in client.generate(request("b", 2))][-1].finish_reason is FinishReason.LENGTH
    finally:
        await supervisor.stop()
    assert not psutil.pid_exists(first)


@pytest.mark.parametrize(("number", "evidence"), [(signal.SIGKILL, Evidence.WEAK), (signal.SIGSEGV, Evidence.STRONG)])
async def test_a_kill_from_outside_says_less_than_a_crash(
    tmp_path: Path, number: signal.Signals, evidence: Evidence
) -> None:
    client, deaths = EngineClient(), Deaths()
    client.set_batch_listener(deaths)
    supervisor = Supervisor(client, config(tmp_path))
    try:
        await supervisor.start()
        stream = client.generate(request("a", 500))
        await anext(stream)
        assert supervisor.engine_pid is not None
        os.kill(supervisor.engine_pid, number)
        with pytest.raises(EngineUnavailableError):
            async for _ in stream:
                pass
        assert deaths.evidence == [evidence]
    finally:
        await supervisor.stop()


async def test_an_engine_that_has_served_is_soon_replaced_and_one_that_does_not_start_ever_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = Supervisor(EngineClient(), config(tmp_path))
    supervisor._first_ready = asyncio.get_running_loop().create_future()
    supervisor._first_ready.set_result(None)  # type: ignore[arg-type]
    lives = iter([None, None, None, None, *[EngineStartError("no")] * 5, None])
    delays: list[float] = []

    async def live() -> None:
        if (error := next(lives)) is not None:
            raise error

    async def note(delay_s: float) -> None:
        delays.append(delay_s)
        supervisor._stopping = len(delays) == 9

    monkeypatch.setattr(supervisor, "_one_life", live)
    monkeypatch.setattr(asyncio, "sleep", note)
    await supervisor._run()
    assert delays == [0.5, 1.0, 2.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    await supervisor.stop()


@pytest.mark.acceptance("A2", "a request in the step and one that waits when the engine is killed")
async def test_only_the_requests_of_the_last_step_are_lost(tmp_path: Path) -> None:
    client = EngineClient()
    supervisor = Supervisor(client, config(tmp_path, max_num_seqs=1))
    try:
        await supervisor.start()
        running = client.generate(request("running", 900))
        await anext(running)
        waiting = asyncio.ensure_future(_collect(client, request("waiting", 3)))
        await asyncio.sleep(0)
        assert supervisor.engine_pid is not None
        os.kill(supervisor.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError):
            async for _ in running:
                pass
        assert len(await waiting) == 3
    finally:
        await supervisor.stop()


@pytest.mark.acceptance("A5", "an engine that is stopped for good")
async def test_silent_engine_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop_clock: LoopClock
) -> None:
    monkeypatch.setattr("neaptide.server.link.supervisor.LEAST_SILENCE_S", FOR_EVER_S)
    client, deaths = EngineClient(), Deaths()
    client.set_batch_listener(deaths)
    supervisor = Supervisor(client, config(tmp_path))
    try:
        await supervisor.start()
        first = await signal_under_a_stream(client, supervisor, signal.SIGSTOP, loop_clock)
        assert not psutil.pid_exists(first)
        assert deaths.evidence == [Evidence.STRONG]  # killed, but by us, for its silence
        assert len(await _collect(client, request("b", 2))) == 2
    finally:
        await supervisor.stop()


@pytest.mark.acceptance("A5", "stacks of an engine that is asked where it stands")
async def test_engine_tells_where_it_stands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(EngineClient(), config(tmp_path))
    try:
        await supervisor.start()
        assert supervisor.engine_pid is not None
        os.kill(supervisor.engine_pid, signal.SIGUSR1)
        text = ""
        while "in run_engine" not in text:
            await asyncio.sleep(0.01)
            text += capfd.readouterr().err
    finally:
        await supervisor.stop()


async def _collect(client: EngineClient, message: AddRequest) -> list[int]:
    return [token async for output in client.generate(message) for token in output.new_token_ids]


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
            await supervisor.start()
    finally:
        await supervisor.stop()


async def test_process_that_cannot_be_killed_keeps_no_stream_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop_clock: LoopClock
) -> None:
    for name, seconds in (("LEAST_SILENCE_S", FOR_EVER_S), ("LAST_CHANCE_S", 0.1), ("DUMP_S", 0.1)):
        monkeypatch.setattr(f"neaptide.server.link.supervisor.{name}", seconds)
    monkeypatch.setattr("neaptide.server.children.start.KILL_TIMEOUT_S", 0.1)
    client = EngineClient()
    supervisor = Supervisor(client, config(tmp_path))
    try:
        await supervisor.start()
        assert supervisor._engine is not None
        process = supervisor._engine.process
        stream = client.generate(request("a", 900))
        await anext(stream)
        monkeypatch.setattr(process, "kill", lambda: None)
        monkeypatch.setattr(process, "send_signal", lambda number: None)
        os.kill(process.pid, signal.SIGSTOP)
        await loop_clock.pass_s(2 * FOR_EVER_S)
        try:
            with pytest.raises(EngineUnavailableError):
                async for _ in stream:
                    pass
            assert process.returncode is None
        finally:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
    finally:
        await supervisor.stop()


async def test_engine_that_speaks_in_its_last_chance_lives_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No silence is short enough: every word of the engine comes in its last chance.
    for name, value in (("LEAST_SILENCE_S", 0.0), ("SILENCE_STEPS", 0.0), ("LAST_CHANCE_S", FOR_EVER_S)):
        monkeypatch.setattr(f"neaptide.server.link.supervisor.{name}", value)
    client = EngineClient()
    supervisor = Supervisor(client, config(tmp_path))
    try:
        await supervisor.start()
        first = supervisor.engine_pid
        assert len(await _collect(client, request("a", 5))) == 5
        assert supervisor.engine_pid == first
    finally:
        await supervisor.stop()


async def test_engine_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise RuntimeError('not the numpy that was installed')")
    monkeypatch.chdir(tmp_path)
    supervisor = Supervisor(EngineClient(), config(tmp_path))
    try:
        assert (await supervisor.start()).num_blocks == 512
    finally:
        await supervisor.stop()


async def test_engine_whose_words_cannot_be_taken_is_replaced(tmp_path: Path) -> None:
    client = EngineClient()
    supervisor = Supervisor(client, config(tmp_path))
    told: list[str] = []

    def fail_once(code: str) -> None:
        told.append(code)
        if len(told) == 1:
            raise RuntimeError("nobody can count this")

    client.add_error_listener(fail_once)
    try:
        await supervisor.start()
        first = supervisor.engine_pid
        assert await _collect(client, request("too long", 5000)) == []  # the second engine's words are heard
        assert supervisor.engine_pid not in (first, None)
        assert told == ["prompt and output exceed the context length or the KV cache"] * 2
    finally:
        await supervisor.stop()


@contextlib.contextmanager
def spoken_to(path: Path) -> Iterator[tuple[_Engine, zmq.Socket[bytes], int, list[FromEngine]]]:
    """An engine without a process, a socket to speak as it, the descriptor of ours, and what has been heard."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind(f"ipc://{path}/socket")
        theirs.connect(f"ipc://{path}/socket")
        arrivals_fd = create_arrivals()
        engine = _Engine(None, ours, path, -1, OnlineArrivals(arrivals_fd))  # type: ignore[arg-type]
        os.close(arrivals_fd)
        descriptor = int(ours.getsockopt(zmq.FD))
        heard: list[FromEngine] = []
        try:
            engine.listen(heard.append)
            yield engine, theirs, descriptor, heard
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)


async def test_words_that_come_before_another_message_is_sent_are_heard(tmp_path: Path) -> None:
    """The descriptor of the socket tells of a change once, and sending takes notice of it."""
    with spoken_to(tmp_path) as (engine, theirs, descriptor, heard):
        await settle()
        theirs.send(from_engine_encoder.encode(StepOutputs([], [])))
        select.select([descriptor], [], [], 30.0)
        engine.send(AbortRequest(["nobody"]))
        assert select.select([descriptor], [], [], 0.0)[0] == []
        await settle()
        assert len(heard) == 1


async def test_last_words_of_an_engine_that_has_ended_are_heard(tmp_path: Path) -> None:
    """All of them at once: nobody waits for another turn of the loop."""
    with spoken_to(tmp_path) as (engine, theirs, descriptor, heard):
        for _ in range(5):
            theirs.send(from_engine_encoder.encode(StepOutputs([], [])))
        while len(heard) < 5 and select.select([descriptor], [], [], 30.0)[0]:
            engine.hear_out()
        assert len(heard) == 5


async def test_tries_that_find_no_process_leave_no_descriptor_and_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is to be had")

    monkeypatch.setattr("neaptide.server.link.supervisor.start_child", refused)
    supervisor = Supervisor(EngineClient(), config(tmp_path))
    try:
        num_open = set[int]()
        for _ in range(6):
            with pytest.raises(BlockingIOError):
                await supervisor._spawn()
            await asyncio.sleep(0.02)  # the library closes sockets in a thread
            num_open.add(len(os.listdir("/proc/self/fd")))
        assert len(num_open) == 1
        assert list(supervisor.directory.iterdir()) == []
    finally:
        await supervisor.stop()

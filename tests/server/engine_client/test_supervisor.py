"""The supervisor with a real engine process (simulated executor)."""

import asyncio
import contextlib
import math
import os
import select
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.engine.messages import (
    AbortRequest,
    AddRequest,
    FromEngine,
    StepOutputs,
    from_engine_encoder,
)
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.engine.process.arrivals import OnlineArrivals, create_arrivals
from neaptide.launch.serve import embedded_model_path
from neaptide.server.engine_client.client import EngineClient, EngineUnavailableError
from neaptide.server.engine_client.deaths import Evidence
from neaptide.server.engine_client.events import EngineLost, RequestFailed
from neaptide.server.engine_client.supervisor import EngineStartError, Supervisor, _Engine
from tests.patience import until, until_here
from tests.server.asgi import settle
from tests.server.engine_client.loop_clock import LoopClock

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
        await pass_until_it_is_gone(client, clock)
    with pytest.raises(EngineUnavailableError):
        async for _ in stream:
            pass
    await client.wait_ready()
    assert supervisor.engine_pid not in (first, None)
    return first


async def pass_until_it_is_gone(client: EngineClient, clock: LoopClock) -> None:
    """Turns the clock again and again: what a stopped engine said last may still be on its way, and begins its silence
    anew."""
    while client.is_ready:
        await clock.pass_s(FOR_EVER_S)
        await asyncio.sleep(0.001)


def patient(client: EngineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """With its engines, until a test turns the clock."""
    monkeypatch.setattr("neaptide.server.engine_client.watchdog.LEAST_SILENCE_S", FOR_EVER_S)
    monkeypatch.setattr("neaptide.server.engine_client.supervisor.LOOK_S", FOR_EVER_S)
    return Supervisor(client, config(tmp_path), longest_silence_s=FOR_EVER_S)


class Deaths:
    """Notes what the ends of engines say."""

    def __init__(self, client: EngineClient) -> None:
        self.evidence: list[Evidence] = []
        client.subscribe(EngineLost, lambda lost: self.evidence.append(lost.evidence))


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
async def test_a_kill_from_outside_says_less_than_a_crash_and_the_log_names_its_signal(
    tmp_path: Path, number: signal.Signals, evidence: Evidence, caplog: pytest.LogCaptureFixture
) -> None:
    client = EngineClient()
    deaths = Deaths(client)
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
        await until(lambda: f"(killed by signal {number.value}, {number.name}" in caplog.text)
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


async def test_the_supervisor_gives_up_after_five_engines_that_did_not_start_and_hopes_again_with_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient()
    supervisor = Supervisor(client, config(tmp_path))
    starts, given_up = [True, *[False] * 6, True], list[bool]()

    async def spawn() -> _Engine:
        if not starts.pop(0):
            raise OSError("no process is to be had")
        return await Supervisor._spawn(supervisor)

    async def note(delay_s: float) -> None:
        given_up.append(client.has_given_up)

    try:
        monkeypatch.setattr(supervisor, "_spawn", spawn)
        await supervisor.start()
        stream = client.generate(request("a", 900))
        await anext(stream)
        monkeypatch.setattr(asyncio, "sleep", note)
        assert supervisor.engine_pid is not None
        os.kill(supervisor.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailableError):
            async for _ in stream:
                pass
        await client.wait_ready()
        assert given_up == [False, *[False] * 4, True, True]
        assert not client.has_given_up
    finally:
        monkeypatch.undo()
        await supervisor.stop()
    assert client.has_given_up  # no engine follows


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
    monkeypatch.setattr("neaptide.server.subprocesses.start.KILL_TIMEOUT_S", math.inf)
    client = EngineClient()
    deaths = Deaths(client)
    supervisor = patient(client, tmp_path, monkeypatch)
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
    client = EngineClient()
    supervisor = patient(client, tmp_path, monkeypatch)
    try:
        await supervisor.start()
        assert supervisor._engine is not None
        process = supervisor._engine.process
        stream = client.generate(request("a", 900))
        await anext(stream)
        monkeypatch.setattr(process, "kill", lambda: None)
        monkeypatch.setattr(process, "send_signal", lambda number: None)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            await pass_until_it_is_gone(client, loop_clock)
            with pytest.raises(EngineUnavailableError):
                async for _ in stream:
                    pass
            assert process.returncode is None
        finally:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
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

    def fail_once(failed: RequestFailed) -> None:
        told.append(failed.code)
        if len(told) == 1:
            raise RuntimeError("nobody can count this")

    client.subscribe(RequestFailed, fail_once)
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
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        context.linger = 0  # nobody waits for what is unsent when the test ends
        ours, theirs = (stack.enter_context(context.socket(zmq.PAIR)) for _ in range(2))
        ours.bind(f"ipc://{path}/socket")
        theirs.connect(f"ipc://{path}/socket")
        arrivals_fd = create_arrivals()
        engine = _Engine(None, ours, path, -1, OnlineArrivals(arrivals_fd), FOR_EVER_S)  # type: ignore[arg-type]
        os.close(arrivals_fd)
        descriptor = int(ours.getsockopt(zmq.FD))
        stack.callback(asyncio.get_running_loop().remove_reader, descriptor)
        heard: list[FromEngine] = []
        engine.listen(lambda message, *, is_last: heard.append(message))
        yield engine, theirs, descriptor, heard


async def test_words_that_come_before_another_message_is_sent_are_heard(tmp_path: Path) -> None:
    """The descriptor of the socket tells of a change once, and sending takes notice of it."""
    with spoken_to(tmp_path) as (engine, theirs, descriptor, heard):
        # The other end has come, and was heard to: the next change is a word.
        until_here(lambda: engine.reaches(AbortRequest(["nobody"])))
        await settle()
        theirs.send(from_engine_encoder.encode(StepOutputs([], [])))
        until_here(lambda: is_readable(descriptor))
        while is_readable(descriptor):
            engine.send(AbortRequest(["nobody"]))
        assert heard == []
        await settle()
        assert len(heard) == 1


def is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0.0)[0])


async def test_last_words_of_an_engine_that_has_ended_are_heard(tmp_path: Path) -> None:
    """All of them at once: nobody waits for another turn of the loop."""
    with spoken_to(tmp_path) as (engine, theirs, _, heard):
        for _ in range(5):
            theirs.send(from_engine_encoder.encode(StepOutputs([], [])))

        def have_come() -> bool:
            engine.drain()
            return len(heard) == 5

        until_here(have_come)


async def test_what_accepts_an_engine_waits_for_nothing_that_is_unsent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the limit of the moment in which its socket is bound; with another than 0 a stop could last for ever."""
    limits: list[int] = []
    bind = zmq.Socket.bind

    def note(socket: "zmq.Socket[bytes]", address: str) -> object:
        limits.append(int(socket.getsockopt(zmq.LINGER)))
        return bind(socket, address)

    monkeypatch.setattr(zmq.Socket, "bind", note)
    supervisor = Supervisor(EngineClient(), config(tmp_path))
    try:
        await supervisor.start()
        assert limits == [0]
    finally:
        await supervisor.stop()


async def test_tries_that_find_no_process_leave_no_descriptor_and_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("no process is to be had")

    monkeypatch.setattr("neaptide.server.engine_client.supervisor.start_child", refused)
    supervisor = Supervisor(EngineClient(), config(tmp_path))
    try:
        num_open = list[int]()
        for _ in range(6):
            with pytest.raises(BlockingIOError):
                await supervisor._spawn()
            num_open.append(len(os.listdir("/proc/self/fd")))
        # The library closes sockets in a thread, when it gets to it.
        await until(lambda: len(os.listdir("/proc/self/fd")) <= num_open[0])
        assert list(supervisor.directory.iterdir()) == []
    finally:
        await supervisor.stop()

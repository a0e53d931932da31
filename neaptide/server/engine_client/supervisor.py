"""Starts the engine process, watches it, and restarts it when it ends."""

import asyncio
import contextlib
import logging
import os
import signal
import stat
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from neaptide.engine.config import EngineConfig
from neaptide.engine.messages import (
    EngineFatal,
    EngineReady,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
    from_engine_decoder,
    to_engine_encoder,
)
from neaptide.engine.process.arrivals import OnlineArrivals, create_arrivals
from neaptide.engine.process.crash_marker import create_crash_marker, read_crash_marker
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.engine_client.deaths import Evidence, cause_of_death, was_killed_from_outside
from neaptide.server.engine_client.interpreter import Interpreter
from neaptide.server.engine_client.watchdog import LONGEST_SILENCE_S, Watchdog
from neaptide.server.observe.logs import one_line
from neaptide.server.subprocesses.private_directory import PrivateDirectory
from neaptide.server.subprocesses.start import end_child, start_child

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Time between two checks of a silent engine. A late check shows that this process itself was stopped."""
DUMP_S = 0.5
"""Time for a silent engine to dump its stacks before it is killed."""
SHUTDOWN_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
LONGEST_SERVING_BACKOFF_S = 2.0
"""Longest back-off after an engine that had been ready: whatever killed it will happen to the next engines too."""
STABLE_S = 60.0
"""Life of an engine after which the back-off starts again."""
MAX_MESSAGES_AT_ONCE = 16
"""Most messages that are processed before their consequences. If this process is behind, they are the tokens of several
steps, and go to each connection in one piece."""
MAX_FAILED_STARTS = 5
"""Number of consecutive failed starts after which restarting the server process is more promising."""


class EngineStartError(Exception):
    """The engine refused its configuration, so a restart would not help. Carries one clear line."""


class EngineRefusedError(EngineStartError):
    """A value of the configuration cannot be used."""


class Listener(Protocol):
    """Gets the messages of an engine."""

    def __call__(self, message: FromEngine, *, is_last: bool) -> None:
        """Processes a message; ``is_last`` says that no other waits."""
        ...


class _Engine:
    """One engine process, and the socket to it.

    The event loop itself reads the socket. A future, a task and a timer per message would take longer than all other
    work on a token here.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        socket: zmq.Socket[bytes],
        path: Path,
        crash_marker_fd: int,
        arrivals: OnlineArrivals,
        longest_silence_s: float,
    ):
        self.process = process
        self._socket = socket
        self._path = path
        self._crash_marker_fd = crash_marker_fd
        self._arrivals = arrivals
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self._watchdog = Watchdog(longest_silence_s, self._loop.time())
        self.failed: asyncio.Future[Any] = self._loop.create_future()
        """Gets an exception if a message could not be processed."""
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)

    def listen(self, listener: Listener | None) -> None:
        """Sets the listener of all later messages; without one they wait."""
        self._listener = listener
        self._read()

    def send(self, message: ToEngine) -> None:
        self.reaches(message)

    def reaches(self, message: ToEngine) -> bool:
        """Sends a message; returns whether an engine is connected.

        The queue is unbounded, so this never waits. But it belongs to the connection: there is none before the engine
        has connected or after it has ended.
        """
        # The descriptor signals changes, and sending consumes those that came meanwhile.
        self._loop.call_soon(self._read)
        try:
            self._socket.send(to_engine_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._arrivals.note_sent(message)
        return True

    def drain(self) -> None:
        """Processes all messages that a process left when it ended."""
        while self._has_message and self._take():
            pass

    def _read(self) -> None:
        """Processes waiting messages, and schedules the rest after their consequences."""
        if not self._has_message:
            return
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if not self._take():
                return
        self._loop.call_soon(self._read)

    @property
    def _has_message(self) -> bool:
        """Whether a message waits for the listener; asking is cheaper than a failed attempt to receive."""
        if self._listener is None or self._socket.closed or self.failed.done():
            return False
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _take(self) -> bool:
        """Processes a message; returns whether another one waits."""
        data = self._socket.recv(zmq.NOBLOCK)
        has_more = self._has_message
        try:
            message = from_engine_decoder.decode(data)
            self._note(message)
            assert self._listener is not None
            self._listener(message, is_last=not has_more)
        except Exception as error:
            self.failed.set_exception(error)
            return False
        return has_more and self._has_message

    def _note(self, message: FromEngine) -> None:
        self._watchdog.hear(self._loop.time(), message.stats if isinstance(message, StepOutputs) else ())

    async def hang_or(self, ended: set[asyncio.Future[Any]]) -> None:
        """Returns when the engine has been silent for too long, or when one of ``ended`` is done."""
        while (left_s := self._left_s()) > 0.0:
            began_s, look_s = self._loop.time(), min(left_s, LOOK_S)
            done, _ = await asyncio.wait(ended, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return
            self._watchdog.excuse(self._loop.time() - began_s - look_s)

    def _left_s(self) -> float:
        return self._watchdog.left_s(read_crash_marker(self._crash_marker_fd).predicted_s, self._loop.time())

    async def dump_stacks(self) -> None:
        """Makes a silent engine dump its stacks to stderr, if it still can."""
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            self.process.send_signal(signal.SIGUSR1)
            async with asyncio.timeout(DUMP_S):
                await self.process.wait()

    async def end(self) -> tuple[list[str], Evidence]:
        """Kills the process if it still runs; returns the requests of the step that it crashed in.

        The evidence against them is weak if another process had killed it before.
        """
        evidence = Evidence.WEAK if was_killed_from_outside(self.process.returncode) else Evidence.STRONG
        await end_child(self.process)
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)
        self._path.unlink(missing_ok=True)
        suspects = read_crash_marker(self._crash_marker_fd).request_ids
        os.close(self._crash_marker_fd)
        return suspects, evidence


class Supervisor:
    """Keeps one engine running for an ``EngineClient``, from ``start`` to ``stop``."""

    def __init__(
        self,
        client: EngineClient,
        config: EngineConfig,
        interpreter: Interpreter | None = None,
        longest_silence_s: float = LONGEST_SILENCE_S,
    ) -> None:
        self._client = client
        self._config = config
        self._interpreter = interpreter or Interpreter()
        self._longest_silence_s = longest_silence_s
        self._context = zmq.Context()
        # Set before a socket is bound, because its listener keeps the value of that moment. With another value, closing
        # can wait forever for messages to an engine that has just ended.
        self._context.linger = 0
        self._own = PrivateDirectory()
        self.directory = self._own.path
        self._task: asyncio.Task[None] | None = None
        self._first_ready: asyncio.Future[EngineReady] | None = None
        self._engine: _Engine | None = None
        self._starts = 0
        self._failed_starts = 0
        """Number of consecutive failed starts."""
        self._cause = "it could not be run"
        """How the last engine ended."""
        self._stopping = False

    @property
    def engine_pid(self) -> int | None:
        return self._engine.process.pid if self._engine is not None else None

    async def start(self) -> EngineReady:
        """Returns when the first engine is ready.

        Raises:
            EngineStartError: it refused to start.
        """
        self._first_ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="engine supervisor")
        return await self._first_ready

    async def stop(self) -> None:
        """Asks the engine to end, waits a little, then kills it. No process remains."""
        self._stopping = True
        # An engine that still starts reads no messages and has nothing to clean up.
        if self._engine is not None and self._engine.reaches(Shutdown()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self._engine.process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)
        self._own.remove()

    async def _run(self) -> None:
        try:
            await self._keep_running()
        finally:
            self._client.has_given_up = True

    async def _keep_running(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            longest_s = LONGEST_BACKOFF_S
            try:
                await self._one_life()
                longest_s = LONGEST_SERVING_BACKOFF_S
            except EngineStartError as error:
                assert self._first_ready is not None
                if not self._first_ready.done():
                    self._first_ready.set_exception(error)
                    return
                logger.error("the engine could not be restarted: %s", error)
            except Exception as error:
                # The cause may be a lack of processes or descriptors, which the next attempt may find.
                logger.exception("the engine could not be started")
                assert self._first_ready is not None
                if not self._first_ready.done():
                    self._first_ready.set_exception(EngineStartError(f"the engine could not be started: {error}"))
                    return
            if self._stopping:
                return
            self._client.has_given_up = self._failed_starts >= MAX_FAILED_STARTS
            if loop.time() - started_s > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            backoff_s = min(backoff_s, longest_s)
            logger.warning("the engine ended; it restarts in %.1f s (%s)", backoff_s, self._cause)
            await asyncio.sleep(backoff_s)
            backoff_s *= 2

    async def _one_life(self) -> None:
        self._failed_starts += 1
        engine = self._engine = await self._spawn()
        try:
            ready = await self._wait_ready(engine)
            self._failed_starts = 0
            self._warn_of_long_steps(ready)
            self._client.attach(engine, ready)
            assert self._first_ready is not None
            if not self._first_ready.done():
                self._first_ready.set_result(ready)
            await self._pump(engine)
        finally:
            suspects, evidence = list[str](), Evidence.EXCUSED
            self._cause = self._client.last_end = cause_of_death(engine.process.returncode)
            try:
                suspects, evidence = await engine.end()
            finally:
                self._client.detach([] if self._stopping else suspects, evidence)
                self._engine = None

    def _warn_of_long_steps(self, ready: EngineReady) -> None:
        if ready.longest_step_s >= self._longest_silence_s:
            logger.warning(
                "a step may take %.0f s, but an engine that is silent for engine_timeout_s = %g is replaced; "
                "raise engine_timeout_s or lower max_num_batched_tokens",
                ready.longest_step_s,
                self._longest_silence_s,
            )

    async def _spawn(self) -> _Engine:
        """Starts an engine process.

        Raises:
            OSError: no process or descriptor is available; nothing of the attempt remains.
        """
        self._starts += 1
        # Each engine process has its own socket, so that late messages of an old one are not read.
        path = self.directory / f"engine-{self._starts}.sock"
        with contextlib.ExitStack() as undone:
            undone.callback(path.unlink, missing_ok=True)
            socket = self._context.socket(zmq.PAIR)
            undone.callback(socket.close, linger=0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(f"ipc://{path}")
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
            crash_marker_fd = create_crash_marker()
            undone.callback(os.close, crash_marker_fd)
            arrivals_fd = create_arrivals()
            try:
                arrivals = OnlineArrivals(arrivals_fd)
                process = await self._start_process(path, crash_marker_fd, arrivals_fd)
            finally:
                os.close(arrivals_fd)
            undone.pop_all()
        return _Engine(process, socket, path, crash_marker_fd, arrivals, self._longest_silence_s)

    async def _start_process(self, path: Path, crash_marker_fd: int, arrivals_fd: int) -> asyncio.subprocess.Process:
        config = msgspec.structs.replace(self._config, crash_marker_fd=crash_marker_fd, arrivals_fd=arrivals_fd)
        return await start_child(
            "neaptide.launch.serve",
            f"ipc://{path}",
            msgspec.json.encode(config).decode(),
            executable=self._interpreter.executable,
            environment=self._interpreter.environment(self.directory),
            talks=False,
            pass_fds=[crash_marker_fd, arrivals_fd],
        )

    async def _wait_ready(self, engine: _Engine) -> EngineReady:
        first: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def hear(message: FromEngine, *, is_last: bool) -> None:
            engine.listen(None)  # Later messages are for the client.
            first.set_result(message)

        engine.listen(hear)
        ended: asyncio.Future[Any] = asyncio.ensure_future(engine.process.wait())
        try:
            await asyncio.wait({first, ended, engine.failed}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                # Its last message may still be on its way.
                await asyncio.wait({first, engine.failed}, timeout=1.0)
            if engine.failed.done():
                engine.failed.result()
            message = first.result() if first.done() else None
        finally:
            engine.listen(None)
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
        if isinstance(message, EngineReady):
            return message
        if isinstance(message, EngineFatal):
            kind = EngineRefusedError if message.is_wrong_value else EngineStartError
            raise kind(one_line(message.message))
        cause = cause_of_death(engine.process.returncode)
        raise EngineStartError(f"the engine process ended before it was ready ({cause})")

    async def _pump(self, engine: _Engine) -> None:
        """Passes messages on until the process ends or is silent for too long."""
        ended: asyncio.Future[Any] = asyncio.ensure_future(engine.process.wait())
        engine.listen(self._client.on_message)
        try:
            await engine.hang_or({ended, engine.failed})
            if engine.failed.done():
                engine.failed.result()
            if ended.done():
                engine.drain()
                return
            logger.error("the engine has been silent for too long and is killed")
            await engine.dump_stacks()
        finally:
            engine.listen(None)
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

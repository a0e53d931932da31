"""The owner's side: starts the front processes, relays their requests to the engine, and counts for them."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from neaptide.engine.messages import AbortRequest, AddRequest, EngineReady, RequestOutput, StepOutputs
from neaptide.engine.params import RequestClass, Tier
from neaptide.server.context import ServingContext
from neaptide.server.engine_client.deaths import Evidence, cause_of_death
from neaptide.server.engine_client.supervisor import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, STABLE_S
from neaptide.server.fronts.link import FrontLink
from neaptide.server.fronts.messages import (
    AcceptKeys,
    AmountsTaken,
    DrainFront,
    EngineEnded,
    EnterQueue,
    FrontTally,
    FrontTerms,
    KeyRefused,
    KeyUsed,
    LeaveQueue,
    QueueEntered,
    RequestBegun,
    RequestEnded,
    RequestRefused,
    ReturnAmounts,
    TakeAmounts,
    ToFront,
    to_owner_decoder,
)
from neaptide.server.http.auth import AcceptedKey, KeyRing
from neaptide.server.http.errors import OverloadedError
from neaptide.server.limits.counts import Amounts, Taken
from neaptide.server.limits.limiter import RateLimiter
from neaptide.server.limits.usage import Excess
from neaptide.server.observe.metrics import ServerMetrics
from neaptide.server.observe.request_log import RequestRecord
from neaptide.server.observe.timing import ChoiceTiming, RequestTiming
from neaptide.server.subprocesses.private_directory import PrivateDirectory
from neaptide.server.subprocesses.start import end_child, start_child

logger = logging.getLogger(__name__)

SOCKET = "owner.sock"
"""Name of the unix socket on which the owner gets what front processes forward."""
MODULE = "neaptide.launch.front"
MAX_UNSENT_BYTES = 64 << 20
"""Bytes that a front process may leave unread. One that leaves more hangs, and is replaced."""
LOOK_S = 10.0
"""Time between two looks at a process. One that says nothing between three looks hangs: it reports every second."""
END_S = 1.0
"""Time for a process to end after its connection to the owner has."""
LOST = "api_process_lost"
"""Error code, in log and metrics, of requests whose front process died."""


@dataclass(slots=True, kw_only=True)
class OwnerParts:
    """Parts of the owner that its front processes use."""

    context: ServingContext
    metrics: ServerMetrics
    limiter: RateLimiter
    keys: KeyRing


@dataclass(slots=True)
class _Begun:
    tier: Tier
    timing: RequestTiming


@dataclass(slots=True)
class _TakenAmounts:
    tenant: str
    amounts: Amounts
    taken: Taken


@dataclass(slots=True)
class _FrontHoldings:
    """What one front process holds, by its numbers; the owner releases it when the process dies."""

    queued: dict[int, tuple[RequestClass, str, int]] = field(default_factory=dict)
    """Class, share and choices."""
    begun: dict[int, _Begun] = field(default_factory=dict)
    taken: dict[int, _TakenAmounts] = field(default_factory=dict)
    connections: int = 0


class FrontPeer:
    """One life of a front process, seen from the owner. Implements ``Relay``."""

    def __init__(self, parts: OwnerParts, process: asyncio.subprocess.Process) -> None:
        self._parts = parts
        self._process = process
        self._held = _FrontHoldings()
        self._outputs: list[RequestOutput] = []
        self._taking: dict[int, asyncio.Task[None]] = {}
        self._num_heard = 0
        self.link = FrontLink(self._on_frame)

    # ---- to the front ----

    def tell(self, message: ToFront) -> None:
        """Sends a message."""
        self.link.tell(message)
        if self.link.num_unsent_bytes > MAX_UNSENT_BYTES:
            self._kill("does not read what it is sent")

    def on_ready(self, info: EngineReady) -> None:
        """As in ``Relay``."""
        self.tell(info)

    def on_lost(self, suspects: Sequence[str], evidence: Evidence) -> None:
        """As in ``Relay``."""
        self.tell(EngineEnded(list(suspects), evidence))

    def give(self, output: RequestOutput) -> None:
        """As in ``Relay``."""
        self._outputs.append(output)

    def flush(self) -> None:
        """As in ``Relay``."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self.tell(StepOutputs(outputs, []))

    def _kill(self, fault: str) -> None:
        if self._process.returncode is None:
            logger.error("an API process %s, and is killed", fault)
            self._process.kill()

    async def until_ended(self) -> None:
        """Returns when the process has ended, and kills one that hangs. The first look waits for its first word."""
        before, num_silent = 0, 0
        while not (await asyncio.wait({self.link.closed}, timeout=LOOK_S))[0]:
            num_silent = num_silent + 1 if self._num_heard == before > 0 else 0
            before = self._num_heard
            # Two looks: after the first one the whole machine may have been stopped.
            if num_silent == 2:
                self._kill("is silent")

    # ---- from the front ----

    def _on_frame(self, frame: bytes, _: bool) -> None:
        self._num_heard += 1
        context, metrics, limiter = self._parts.context, self._parts.metrics, self._parts.limiter
        match to_owner_decoder.decode(frame):
            case AddRequest() as request:
                context.client.add_relayed(request, self)
            case AbortRequest(request_ids, reason):
                context.client.abort_relayed(request_ids, reason)
            case EnterQueue() as asked:
                self._enter(asked)
            case LeaveQueue(number):
                self._leave(number)
            case TakeAmounts() as asked_amounts:
                self._taking[asked_amounts.number] = asyncio.create_task(self._take(asked_amounts))
            case ReturnAmounts(number, amounts):
                self._return(number, amounts)
            case KeyUsed(principal, tokens):
                limiter.metrics.ended(principal, tokens, counts=True)
            case KeyRefused(principal, limit):
                limiter.metrics.refused(principal, limit)
            case RequestRefused(record):
                metrics.on_refused(record)
            case RequestBegun(number, tier, arrival_s):
                begun = self._held.begun[number] = _Begun(tier, RequestTiming(arrival_s))
                metrics.on_begun(tier, begun.timing)
            case RequestEnded(number, record, terms, timing):
                self._end(number, record, terms, timing.choices)
            case FrontTally() as tally:
                self._add(tally)

    def _enter(self, asked: EnterQueue) -> None:
        entry = (asked.request_class, asked.share, asked.choices)
        try:
            self._parts.context.admission.enter(*entry)
        except OverloadedError:
            self.tell(QueueEntered(asked.number, is_admitted=False))
        else:
            self._held.queued[asked.number] = entry
            self.tell(QueueEntered(asked.number, is_admitted=True))

    def _leave(self, number: int) -> None:
        if (entry := self._held.queued.pop(number, None)) is not None:
            self._parts.context.admission.leave(*entry)

    async def _take(self, asked: TakeAmounts) -> None:
        counts = self._parts.limiter.counts
        try:
            found = await counts.take(asked.tenant, asked.limits, asked.amounts)
        finally:
            del self._taking[asked.number]
        if isinstance(found, Excess):
            self.tell(AmountsTaken(asked.number, found, counts.levels(asked.tenant, asked.limits)))
        else:
            self._held.taken[asked.number] = _TakenAmounts(asked.tenant, asked.amounts, found)
            self.tell(AmountsTaken(asked.number, None, found.by.levels(asked.tenant, asked.limits)))

    def _return(self, number: int, amounts: Amounts) -> None:
        if (taking := self._taking.get(number)) is not None:  # its client has left meanwhile
            taking.add_done_callback(lambda _: self._return(number, amounts))
        elif (held := self._held.taken.pop(number, None)) is not None:
            held.taken.by.give_back(held.tenant, amounts, held.taken.place)

    def _end(self, number: int, record: RequestRecord, terms: FrontTerms, choices: list[ChoiceTiming]) -> None:
        timing = self._held.begun.pop(number).timing
        timing.choices = choices
        self._parts.metrics.on_finished(record, terms, timing)

    def _add(self, tally: FrontTally) -> None:
        metrics, http = self._parts.metrics, self._parts.metrics.http
        for tier, (prompt, cached, generated) in tally.tokens.items():
            metrics.on_tokens(tier, prompt, cached, generated)
        for tier, gaps in tally.gaps_s.items():
            metrics.on_gaps(tier, gaps)
        for number in tally.started:
            if (begun := self._held.begun.get(number)) is not None:
                begun.timing.choices = [ChoiceTiming(first_s=begun.timing.arrival_s)]
        for reply in tally.replies:
            http.on_http(*reply)
        for reason in tally.ended_connections:
            http.on_ended(reason)
        http.connections.inc(tally.connections - self._held.connections)
        self._held.connections = tally.connections
        for tenant, amounts in tally.used.items():
            self._parts.limiter.counts.add(tenant, amounts)

    async def release(self) -> None:
        """Releases what the ended process held. Its clients' connections have broken."""
        for task in list(self._taking.values()):
            await asyncio.gather(task, return_exceptions=True)
        context, held, self._held = self._parts.context, self._held, _FrontHoldings()
        for entry in held.queued.values():
            context.admission.leave(*entry)
        for one in held.taken.values():
            one.taken.by.give_back(one.tenant, one.amounts, one.taken.place)
        for begun in held.begun.values():
            begun.timing.choices = [ChoiceTiming()]
            terms = FrontTerms(begun.tier, 1, [1], context.ttft_slo_s, context.tpot_slo_s)
            record = RequestRecord(
                request_id="",
                endpoint="unknown",
                tier=begun.tier.value,
                model=context.model_id,
                outcome="server_error",
                error_code=LOST,
            )
            self._parts.metrics.on_finished(record, terms, begun.timing)
        self._parts.metrics.http.connections.dec(held.connections)


class Fronts:
    """The front processes of a server. Event loop only.

    Args:
        count: number of processes.
        settings_json: the server's settings for them, with its port and without secrets.
        own: directory of the owner's unix socket, to which they forward everything but generation requests.
    """

    def __init__(self, count: int, parts: OwnerParts, settings_json: str, own: PrivateDirectory) -> None:
        self._count = count
        self._parts = parts
        self._settings_json = settings_json
        self._own = own
        self._accepted: list[AcceptedKey] = []
        self._peers: set[FrontPeer] = set()
        self._lives: set[asyncio.Task[None]] = set()
        self._draining = asyncio.Event()

    def start(self) -> None:
        """Starts the processes and keeps them running."""
        self._parts.keys.subscribe(self._on_keys)
        for _ in range(self._count):
            self._lives.add(asyncio.create_task(self._keep_running(), name="API process"))

    def drain(self) -> set[asyncio.Task[None]]:
        """Passes a stop signal on. Returns tasks that end with the processes."""
        self._draining.set()
        for peer in self._peers:
            peer.tell(DrainFront())
        return self._lives

    async def stop(self, within_s: float) -> None:
        """Kills the processes that have not ended in time; those that are not draining, at once."""
        if self._lives and self._draining.is_set():
            await asyncio.wait(self._lives, timeout=within_s)
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        self._own.remove()

    def _on_keys(self, accepted: Sequence[AcceptedKey]) -> None:
        self._accepted = list(accepted)
        for peer in self._peers:
            peer.tell(AcceptKeys(self._accepted))

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while not self._draining.is_set():
            began_s = loop.time()
            try:
                cause = await self._one_life()
            except OSError as error:
                cause = str(error)
            if self._draining.is_set():
                return
            if loop.time() - began_s > STABLE_S:
                backoff_s = FIRST_BACKOFF_S
            logger.warning("an API process ended; it restarts in %.1f s (%s)", backoff_s, cause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._draining.wait()
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _one_life(self) -> str:
        """Runs one process until it ends; returns how it ended."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await self._start_process(theirs)
        except BaseException:
            ours.close()
            raise
        peer = FrontPeer(self._parts, process)
        try:
            await asyncio.get_running_loop().create_connection(lambda: peer.link, sock=ours)
            self._peers.add(peer)
            peer.tell(AcceptKeys(self._accepted))
            self._parts.context.client.add_relay(peer)
            if self._draining.is_set():
                peer.tell(DrainFront())
            await peer.until_ended()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
        finally:
            await end_child(process)
            peer.link.close()
            if peer in self._peers:
                self._peers.remove(peer)
                self._parts.context.client.remove_relay(peer)
            await peer.release()
        return cause_of_death(process.returncode)

    async def _start_process(self, theirs: socket.socket) -> asyncio.subprocess.Process:
        return await start_child(
            MODULE,
            str(theirs.fileno()),
            str(self._own.path / SOCKET),
            self._settings_json,
            talks=False,
            pass_fds=[theirs.fileno()],
        )

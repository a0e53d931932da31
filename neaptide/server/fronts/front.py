"""A front process's side: what a generation request uses of the server, where the owner has it."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from neaptide.engine.messages import AbortRequest, AddRequest, EngineReady, StepOutputs, ToEngine
from neaptide.engine.params import RequestClass, Tier
from neaptide.server.context import Admission, no_room
from neaptide.server.engine_client.client import EngineClient
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
    ToOwner,
    to_front_decoder,
)
from neaptide.server.http.auth import KeyRing, Principal
from neaptide.server.limits.counts import Amounts, Taken
from neaptide.server.limits.usage import Excess, KeyLimits, Level, LimitName, Place
from neaptide.server.observe.metrics import ONLINE_TIERS, ServerMetrics
from neaptide.server.observe.metrics_http import HttpMetrics
from neaptide.server.observe.metrics_keys import KeyMetrics
from neaptide.server.observe.request_log import RequestRecord, RequestTerms
from neaptide.server.observe.timing import RequestTiming

TALLY_EVERY_S = 0.1
SIGN_OF_LIFE_EVERY = 10
"""Every so many tallies are sent even if they are empty."""


class OwnerPeer:
    """The owner, seen from a front process. Implements ``EngineLink``. Event loop only.

    Args:
        client: gets the engine's messages.
        keys: gets the accepted keys.
        on_drain: called at each stop signal.
    """

    def __init__(self, client: EngineClient, keys: KeyRing, on_drain: Callable[[], None]) -> None:
        self._client = client
        self._keys = keys
        self._on_drain = on_drain
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.has_keys = asyncio.Event()
        """Set when the accepted keys are known."""
        self.link = FrontLink(self._on_frame)

    def number(self) -> int:
        """A new number for what the owner keeps for this process."""
        return next(self._numbers)

    def send(self, message: ToEngine) -> None:
        """As in ``EngineLink``."""
        if not isinstance(message, AddRequest | AbortRequest):
            raise TypeError(f"a front process sends no {type(message).__name__}")
        self.link.tell(message)

    def tell(self, message: ToOwner) -> None:
        """Sends a message."""
        self.link.tell(message)

    async def enter(self, asked: EnterQueue) -> bool:
        """Whether the owner admits the request."""
        entered: QueueEntered = await self._ask(asked.number, asked)
        return entered.is_admitted

    async def take(self, asked: TakeAmounts) -> AmountsTaken:
        """The owner's answer."""
        taken: AmountsTaken = await self._ask(asked.number, asked)
        return taken

    async def _ask(self, number: int, message: ToOwner) -> Any:
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self.link.tell(message)
        try:
            return await answer
        finally:
            del self._waiting[number]

    def _on_frame(self, frame: bytes, is_last: bool) -> None:
        message = to_front_decoder.decode(frame)
        match message:
            case StepOutputs():
                self._client.on_message(message, is_last=is_last)
            case AmountsTaken() | QueueEntered():
                answer = self._waiting.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case EngineReady():
                self._client.attach(self, message)
            case EngineEnded(suspects, evidence):
                self._client.detach(suspects, evidence)
            case AcceptKeys(accepted):
                self._keys.accept(accepted)
                self.has_keys.set()
            case DrainFront():
                self._on_drain()


class FrontAdmission(Admission):
    """Admission that the owner counts for all processes. ``check`` knows this process's requests only."""

    def __init__(self, owner: OwnerPeer, max_online: int, max_offline: int) -> None:
        super().__init__(max_online, max_offline)
        self._owner = owner
        self._numbers: defaultdict[tuple[RequestClass, str, int], list[int]] = defaultdict(list)
        """The owner's entries; equal ones are interchangeable."""

    async def admit(self, request_class: RequestClass, tenant: str, choices: int) -> None:
        """As in ``Admission``."""
        number = self._owner.number()
        is_admitted = False
        try:
            is_admitted = await self._owner.enter(EnterQueue(number, request_class, tenant, choices))
        finally:
            if not is_admitted:
                self._owner.tell(LeaveQueue(number))
        if not is_admitted:
            raise no_room(request_class)
        self._numbers[request_class, tenant, choices].append(number)
        # Not ``enter``: the owner has admitted it.
        self.count_entered(request_class, tenant, choices)

    def leave(self, request_class: RequestClass, tenant: str, choices: int) -> None:
        """As in ``Admission``."""
        super().leave(request_class, tenant, choices)
        numbers = self._numbers[request_class, tenant, choices]
        self._owner.tell(LeaveQueue(numbers.pop()))
        if not numbers:
            del self._numbers[request_class, tenant, choices]


class Tallies:
    """What is only counted, until the owner is told.

    Args:
        connections: tells the number of open connections.
    """

    def __init__(self, owner: OwnerPeer, connections: Callable[[], int]) -> None:
        self._owner = owner
        self._connections = connections
        self._told_connections = 0
        self._silent: dict[int, RequestTiming] = {}
        """Begun online requests without a token, by number."""
        self._sending: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self.tokens: dict[Tier, tuple[int, int, int]] = {}
        self.gaps_s: dict[Tier, list[float]] = {tier: [] for tier in Tier}
        self.replies: list[tuple[str, str, int, float]] = []
        self.ended_connections: list[str] = []
        self.used: dict[str, dict[LimitName, int]] = {}

    def begun(self, number: int, timing: RequestTiming) -> None:
        """Notes an online request, whose first token is to be told."""
        self._silent[number] = timing

    def ended(self, number: int) -> None:
        """Notes the end of a request."""
        self._silent.pop(number, None)

    def send(self, *, is_sign_of_life: bool = False) -> None:
        """Tells the owner, if there is anything or it wants a sign of life."""
        started = [number for number, timing in self._silent.items() if timing.ttft_s is not None]
        for number in started:
            del self._silent[number]
        gaps_s = {tier: gaps for tier, gaps in self.gaps_s.items() if gaps}
        connections = self._connections()
        new = (self.tokens, gaps_s, started, self.replies, self.ended_connections, self.used)
        if is_sign_of_life or any(new) or connections != self._told_connections:
            self._told_connections = connections
            self._owner.tell(FrontTally(connections, *new))
            self._begin()

    def start(self) -> None:
        self._sending = asyncio.create_task(self._send_again(), name="tallies")

    async def stop(self) -> None:
        """Tells the owner the rest."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        self.send()

    async def _send_again(self) -> None:
        for number in itertools.count():
            self.send(is_sign_of_life=number % SIGN_OF_LIFE_EVERY == 0)
            await asyncio.sleep(TALLY_EVERY_S)


class FrontCounts:
    """Counts of keys that the owner keeps for all processes. Implements ``Counts``.

    A ``Place`` has the number of what was taken as its slot.
    """

    def __init__(self, owner: OwnerPeer, tallies: Tallies) -> None:
        self._owner = owner
        self._tallies = tallies
        self._levels: dict[str, dict[LimitName, Level]] = {}
        """As of the owner's last answer."""

    async def start(self) -> None:
        """Does nothing: the owner has begun."""

    async def stop(self) -> None:
        """Does nothing."""

    def refusal(self, tenant: str, limits: KeyLimits) -> Excess | None:
        """As in ``Counts``: nothing is known without asking."""
        return None

    async def take(self, tenant: str, limits: KeyLimits, amounts: Amounts) -> Taken | Excess:
        number, wanted = self._owner.number(), dict(amounts)
        try:
            answer = await self._owner.take(TakeAmounts(number, tenant, limits, wanted))
        except asyncio.CancelledError:
            self._owner.tell(ReturnAmounts(number, wanted))
            raise
        self._levels[tenant] = answer.levels
        return Taken(self, Place(number, 0)) if answer.excess is None else answer.excess

    def levels(self, tenant: str, limits: KeyLimits) -> dict[LimitName, Level]:
        known = self._levels.get(tenant, {})
        return {name: known.get(name, Level(0, 0.0)) for name, _ in limits.items()}

    def add(self, tenant: str, amounts: Amounts) -> None:
        used = self._tallies.used.setdefault(tenant, {})
        for name, amount in amounts.items():
            used[name] = used.get(name, 0) + amount

    def give_back(self, tenant: str, amounts: Amounts, place: Place) -> None:
        self._owner.tell(ReturnAmounts(place.slot, dict(amounts)))


class FrontKeyMetrics(KeyMetrics):
    """Series of keys that the owner has."""

    def __init__(self, owner: OwnerPeer) -> None:
        super().__init__(CollectorRegistry())
        self._owner = owner

    def ended(self, principal: Principal, tokens: int, counts: bool) -> None:
        if principal.label and counts:
            self._owner.tell(KeyUsed(principal, tokens))

    def refused(self, principal: Principal, name: LimitName) -> None:
        self._owner.tell(KeyRefused(principal, name))


class FrontHttpMetrics(HttpMetrics):
    """Series of HTTP that the owner has."""

    def __init__(self, tallies: Tallies) -> None:
        super().__init__(CollectorRegistry())
        self._tallies = tallies

    def on_http(self, method: str, route: str, status: int, seconds: float) -> None:
        self._tallies.replies.append((method, route, status, seconds))

    def on_ended(self, reason: str) -> None:
        self._tallies.ended_connections.append(reason)


class FrontMetrics(ServerMetrics):
    """Metrics of requests that the owner has. Its own series stay empty."""

    def __init__(self, owner: OwnerPeer, tallies: Tallies) -> None:
        super().__init__(CollectorRegistry())
        self._owner = owner
        self._tallies = tallies
        self._numbers: dict[int, int] = {}
        """Numbers of begun requests, by ``id`` of their timing."""
        self.http = FrontHttpMetrics(tallies)

    def on_gap(self, tier: Tier, gap_s: float) -> None:
        self._tallies.gaps_s[tier].append(gap_s)

    def on_tokens(self, tier: Tier, prompt_tokens: int, cached_tokens: int, new_tokens: int) -> None:
        prompt, cached, generated = self._tallies.tokens.get(tier, (0, 0, 0))
        if prompt_tokens:
            prompt, cached = prompt + prompt_tokens, cached + cached_tokens
        self._tallies.tokens[tier] = (prompt, cached, generated + new_tokens)

    def on_begun(self, tier: Tier, timing: RequestTiming) -> None:
        number = self._numbers[id(timing)] = self._owner.number()
        if tier in ONLINE_TIERS:
            self._tallies.begun(number, timing)
        self._owner.tell(RequestBegun(number, tier, timing.arrival_s))

    def on_refused(self, record: RequestRecord) -> None:
        self._owner.tell(RequestRefused(record))

    def on_finished(self, record: RequestRecord, prepared: RequestTerms, timing: RequestTiming) -> None:
        number = self._numbers.pop(id(timing))
        self._tallies.ended(number)
        # The tokens first: the owner's metrics never show an ended request without its tokens.
        self._tallies.send()
        terms = FrontTerms(prepared.tier, prepared.n, prepared.max_tokens, prepared.ttft_slo_s, prepared.tpot_slo_s)
        self._owner.tell(RequestEnded(number, record, terms, timing))

"""The replicas behind one address: their state, as they report it, and the choice of one for each request."""

import asyncio
import base64
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import httpx

from neaptide.cluster.autoscaling import Backlog
from neaptide.cluster.routing import Prompt, Router, RoutingFigures
from neaptide.engine.kv.cache_digest import KEY_BYTES
from neaptide.server.http.errors import UnavailableError

logger = logging.getLogger(__name__)

POLL_S, CACHED_S = 0.1, 1.0
"""Intervals between polls of a replica's figures, and between those that include its cache digest."""
ANSWER_S = 2.0
"""Timeout of one answer. It is longer than a step, during which a server answers with older figures."""
LOST_AFTER_S, LOST_AFTER_QUESTIONS = 5.0, 3
"""A replica is lost after this much silence and this many unanswered polls. One answer alone may be late because this
process is slow. A lost replica's requests fail: if it hangs, about seven seconds after its last answer."""
ASKED_FOR_BACKLOG = 2
"""Number of replicas asked before the backlog counts as unknown; all of them read the same database."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)
"""Exceptions raised by reading an answer of another program, or of another version."""
ON_ITS_WAY_S = 0.05
"""A prompt sent this shortly before a report is not counted in it, because it was still being tokenized."""


class ReplicaStatus(StrEnum):
    """State of a replica."""

    READY = "ready"
    """It takes new work."""
    CLOSED = "closed"
    """It answers, but takes no online work, because its engine is starting or it is stopping."""
    LOST = "lost"
    """It does not answer. A new replica is in this state until its first answer."""


class Replica:
    """One server behind the address, from one start to its end."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.state = ReplicaStatus.LOST
        self.lost = asyncio.Event()
        """Set after a long silence; its requests are lost. It stays unset if connections are refused, because what the
        replica has already sent is still being read."""
        self.has_served = False
        """Whether it has ever taken work."""
        self.is_leaving = False
        """It gets no new requests, but may finish those it has."""
        self.num_in_flight = 0
        self.num_shunned = 0
        """How often the router was made to forget it and its requests in flight."""
        self.figures: RoutingFigures | None = None
        self.online_load = 0.0
        """Fraction of its time that its online targets need."""
        self.since_s = -math.inf
        """Loop time of the last change of its state."""
        self._sent: deque[tuple[float, int]] = deque()
        """Send time and tokens of prompts that its reports may not count yet."""

    def sent(self, now_s: float, prompt: Prompt) -> None:
        self._sent.append((now_s, prompt.tokens))

    def take_figures(self, reported: Mapping[str, Any], now_s: float) -> RoutingFigures:
        """Reads a reply of ``/figures``, and subtracts prompts that were on their way when it was made. Raises one of
        ``UNREADABLE``."""
        said_s = now_s - reported["age_ms"] / 1e3
        while self._sent and self._sent[0][0] < said_s - ON_ITS_WAY_S:
            self._sent.popleft()
        token_ms = float(reported["prompt_token_ms"])
        cached = reported["cached"]
        self.online_load = float(reported.get("online_load", 0.0))  # missing from servers of an earlier version
        self.figures = RoutingFigures(
            free_slack_ms=reported["free_slack_ms"] - token_ms * sum(tokens for _, tokens in self._sent),
            ttft_slo_ms=reported["ttft_slo_ms"],
            prompt_token_ms=token_ms,
            digest=None if cached is None else _keys_of(base64.b64decode(cached)),
        )
        return self.figures


def _keys_of(raw: bytes) -> frozenset[bytes]:
    return frozenset(raw[place : place + KEY_BYTES] for place in range(0, len(raw), KEY_BYTES))


class Chosen(NamedTuple):
    """A replica for one request."""

    replica: Replica
    of_router: int | None
    """``num_shunned`` when the router chose it; None: the router did not choose."""


class Replicas:
    """The known replicas. Event loop only.

    Args:
        http: client for polls. It sends a key, if replicas require one.
    """

    def __init__(self, http: httpx.AsyncClient, router: Router) -> None:
        self._http = http
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._known: dict[str, Replica] = {}
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self.num_lives: Counter[str] = Counter()
        """How often a replica of each name has joined."""
        self.block_size = 0
        """Tokens of a KV block; 0 until a replica reports it."""

    # ---- membership ----

    def join(self, name: str, url: str) -> Replica:
        """Adds a replica. It gets requests once it has answered that it is ready. Another one of this name leaves."""
        self.leave(name)
        self.num_lives[name] += 1
        replica = self._known[name] = Replica(name, url)
        watch = self._watches[replica] = self._loop.create_task(self._watch(replica))
        watch.add_done_callback(lambda _: self._watches.pop(replica))
        return replica

    def leave(self, name: str) -> None:
        """Sends it nothing more. Its requests may end."""
        replica = self._known.get(name)
        if replica is not None:
            self._shun(replica, ReplicaStatus.LOST)
            replica.is_leaving = True
            del self._known[name]

    def update(self, found: Mapping[str, str]) -> None:
        """Adds the replicas found (name to URL). One that is no longer found stays until it is no longer ready."""
        known = {replica.name: replica.url for replica in self.all}
        for name in known.keys() - found.keys():
            if not self.is_ready(name):
                self.leave(name)
        for name, url in found.items():
            if known.get(name) != url:
                self.join(name, url)

    async def close(self) -> None:
        """Stops polling."""
        watches = list(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    @property
    def all(self) -> list[Replica]:
        """In the order in which they joined."""
        return list(self._known.values())

    @property
    def num_ready(self) -> int:
        return sum(replica.state is ReplicaStatus.READY for replica in self._known.values())

    def is_ready(self, name: str) -> bool:
        return name in self._known and self._known[name].state is ReplicaStatus.READY

    async def until_ready(self, count: int) -> None:
        """Waits until this many replicas are ready."""
        await self.until(lambda: self.num_ready >= count)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that depends on the replicas' states."""
        while not condition():
            await self._news.wait()

    # ---- choice ----

    def choose(self, prompt: Prompt) -> Chosen:
        """The replica for an online request. ``ended`` must follow. Raises UnavailableError."""
        try:
            replica = self._known[self._router.route(prompt)]
        except LookupError:
            raise no_replica() from None
        replica.sent(self._loop.time(), prompt)
        replica.num_in_flight += 1
        return Chosen(replica, replica.num_shunned)

    def any(self, besides: Replica | None = None) -> Chosen:
        """Chooses a replica for a request that any of them can answer, other than ``besides`` if possible. ``ended``
        must follow. Raises UnavailableError."""
        alive = [replica for replica in self._known.values() if replica.state is not ReplicaStatus.LOST]
        if not alive:
            raise no_replica()
        replica = min(alive, key=lambda one: (one is besides, one.state is not ReplicaStatus.READY, one.num_in_flight))
        replica.num_in_flight += 1
        return Chosen(replica, None)

    def ended(self, chosen: Chosen) -> None:
        """Notes that a chosen replica's request has ended."""
        replica, of_router = chosen
        replica.num_in_flight -= 1
        if of_router == replica.num_shunned:
            self._router.ended(replica.name)

    def refused(self, replica: Replica) -> None:
        """Notes that it refused a connection, so its server is gone."""
        if not replica.is_leaving:
            self._shun(replica, ReplicaStatus.LOST)

    def stops(self, replica: Replica) -> None:
        """Notes that it announced its stop and takes nothing more."""
        if self._known.get(replica.name) is replica:
            self.leave(replica.name)

    # ---- states ----

    async def _watch(self, replica: Replica) -> None:
        heard_s, cached_s, num_unanswered = self._loop.time(), -math.inf, 0
        while not (replica.is_leaving and replica.lost.is_set()):
            now_s = self._loop.time()
            with_cached = now_s - cached_s >= CACHED_S
            num_unanswered += 1
            try:
                reply = await self._ask(replica, with_cached)
            except httpx.ConnectError:
                self.refused(replica)
            except (httpx.HTTPError, TimeoutError):
                pass  # a single missing answer may be chance
            else:
                heard_s, num_unanswered = self._loop.time(), 0
                if with_cached and reply.status_code == 200:
                    cached_s = now_s
                self._take(replica, reply)
            if num_unanswered >= LOST_AFTER_QUESTIONS and self._loop.time() - heard_s >= LOST_AFTER_S:
                self.refused(replica)
                replica.lost.set()
            await asyncio.sleep(POLL_S)

    async def _ask(self, replica: Replica, with_cached: bool) -> httpx.Response:
        parameters = {"cached": "true"} if with_cached else {}
        question = self._http.get(f"{replica.url}/figures", params=parameters, timeout=ANSWER_S)
        # httpx's timeout would not end an answer that trickles in.
        async with asyncio.timeout(ANSWER_S):
            return await question

    def _take(self, replica: Replica, reply: httpx.Response) -> None:
        try:
            self._heard(replica, reply)
        except UNREADABLE as error:
            if replica.state is not ReplicaStatus.CLOSED:
                logger.error("%s sent figures that cannot be read: %s: %s", replica.name, type(error).__name__, error)
            self._shun(replica, ReplicaStatus.CLOSED)

    def _heard(self, replica: Replica, reply: httpx.Response) -> None:
        replica.lost.clear()
        if replica.is_leaving:
            return
        if reply.status_code != 200:
            self._shun(replica, ReplicaStatus.CLOSED)
            return
        reported = reply.json()
        self.block_size = reported["block_size"]
        self._router.report(replica.name, replica.take_figures(reported, self._loop.time()))
        replica.has_served = True
        self._note(replica, ReplicaStatus.READY)

    async def backlog(self) -> list[Backlog] | None:
        """The work left in the batches that all replicas share, with deadlines on the loop's clock; None if no replica
        answers."""
        ready = [replica for replica in self._known.values() if replica.state is ReplicaStatus.READY]
        for replica in ready[:ASKED_FOR_BACKLOG]:
            question = self._http.get(f"{replica.url}/backlog", timeout=ANSWER_S)
            try:
                async with asyncio.timeout(ANSWER_S):
                    reply = (await question).raise_for_status().json()
                now_s = self._loop.time()
                return [Backlog(now_s + one["left_seconds"], one["work_seconds"]) for one in reply["jobs"]]
            except (httpx.HTTPError, TimeoutError, *UNREADABLE):
                continue
        return None

    def _shun(self, replica: Replica, state: ReplicaStatus) -> None:
        self._router.leave(replica.name)
        replica.num_shunned += 1
        self._note(replica, state)

    def _note(self, replica: Replica, state: ReplicaStatus) -> None:
        if state is not replica.state:
            replica.since_s = self._loop.time()
            level = logging.WARNING if state is ReplicaStatus.LOST else logging.INFO
            logger.log(level, "%s at %s is %s", replica.name, replica.url, state)
            replica.state = state
            news, self._news = self._news, asyncio.Event()
            news.set()


def no_replica() -> UnavailableError:
    """The error for a request that no replica can take."""
    return UnavailableError("No replica takes requests now; try again in a few seconds.", code="no_replica")

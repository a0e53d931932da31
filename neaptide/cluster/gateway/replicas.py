"""The replicas behind one address: how each is, by what it says itself, and which one gets a request."""

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
from neaptide.cluster.routing import KEY_BYTES, Figures, Prompt, Router
from neaptide.server.edge.errors import UnavailableError

logger = logging.getLogger(__name__)

POLL_S, CACHED_S = 0.1, 1.0
"""Between two questions for a replica's figures, and between two for what its cache holds."""
ANSWER_S = 2.0
"""For one answer: more than an engine may take for a step before its server says what it knew."""
LOST_AFTER_S, LOST_AFTER_QUESTIONS = 5.0, 3
"""Of silence, and so many questions without an answer: one may be late because this process is. What a replica had
fails then; if it hangs, seven seconds after its last word."""
ASKED_FOR_BACKLOG = 2
"""Replicas, before nothing is known of it: all of them read the same database."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)
"""What reading an answer raises that is another program's, or of another version of ours."""
ON_ITS_WAY_S = 0.05
"""A prompt that was sent so shortly before a report is not in it: it was being tokenized."""


class State(StrEnum):
    """How a replica is."""

    READY = "ready"
    """It takes new work."""
    CLOSED = "closed"
    """It answers, but takes no online work: its engine starts, or it stops."""
    LOST = "lost"
    """It does not answer; also before its first word."""


class Replica:
    """One server behind the address, in one life."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.state = State.LOST
        self.lost = asyncio.Event()
        """Set when it has been silent for long: what waits for it waits in vain. Where nothing listens any more it
        is not, for what the replica has said until then is still being read."""
        self.has_served = False
        """Whether it has ever taken work."""
        self.is_leaving = False
        """It gets nothing any more, but may finish what it has."""
        self.num_in_flight = 0
        self.num_shunned = 0
        """How often the router had to forget it, and with it what is in flight there."""
        self.figures: Figures | None = None
        self.online_load = 0.0
        """The share of its time that its online targets need."""
        self.since_s = -math.inf
        """When its state changed last, on the loop's clock."""
        self._sent: deque[tuple[float, int]] = deque()
        """Prompts that reports may not have in them yet: when, and their tokens."""

    def sent(self, now_s: float, prompt: Prompt) -> None:
        self._sent.append((now_s, prompt.tokens))

    def take_figures(self, reported: Mapping[str, Any], now_s: float) -> Figures:
        """What a reply of ``/figures`` says, less what was on its way there. Raises one of ``UNREADABLE``."""
        said_s = now_s - reported["age_ms"] / 1e3
        while self._sent and self._sent[0][0] < said_s - ON_ITS_WAY_S:
            self._sent.popleft()
        token_ms = float(reported["prompt_token_ms"])
        cached = reported["cached"]
        self.online_load = float(reported.get("online_load", 0.0))  # a server of an earlier version says nothing of it
        self.figures = Figures(
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
    """``num_shunned`` as the router chose it; None: it was not asked."""


class Replicas:
    """Event loop only.

    Args:
        http: for questions.
        headers: of questions: a key, where replicas want one.
    """

    def __init__(self, http: httpx.AsyncClient, router: Router, headers: Mapping[str, str]) -> None:
        self._http = http
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._headers = dict(headers)
        self._known: dict[str, Replica] = {}
        self._watches: dict[Replica, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self.num_lives: Counter[str] = Counter()
        """By name: how often one has joined."""
        self.block_size = 0
        """Tokens of a KV block; 0 until a replica has said it."""

    # ---- who belongs to it ----

    def join(self, name: str, url: str) -> Replica:
        """From its first good word on it gets requests. Another of this name leaves."""
        self.leave(name)
        self.num_lives[name] += 1
        replica = self._known[name] = Replica(name, url)
        watch = self._watches[replica] = self._loop.create_task(self._watch(replica))
        watch.add_done_callback(lambda _: self._watches.pop(replica))
        return replica

    def leave(self, name: str) -> None:
        """It gets nothing more; what it has may end."""
        replica = self._known.get(name)
        if replica is not None:
            self._shun(replica, State.LOST)
            replica.is_leaving = True
            del self._known[name]

    async def close(self) -> None:
        """Asks nobody any more."""
        watches = list(self._watches.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    @property
    def all(self) -> list[Replica]:
        """In the order in which they came."""
        return list(self._known.values())

    @property
    def num_ready(self) -> int:
        return sum(replica.state is State.READY for replica in self._known.values())

    def is_ready(self, name: str) -> bool:
        return name in self._known and self._known[name].state is State.READY

    async def until_ready(self, count: int) -> None:
        """So many take work."""
        await self.until(lambda: self.num_ready >= count)

    async def until(self, condition: Callable[[], bool]) -> None:
        """What depends on how they are holds."""
        while not condition():
            await self._news.wait()

    # ---- who gets a request ----

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
        """One that can be asked for what all of them know, if there is another not ``besides``. ``ended`` must follow.
        Raises UnavailableError."""
        alive = [replica for replica in self._known.values() if replica.state is not State.LOST]
        if not alive:
            raise no_replica()
        replica = min(alive, key=lambda one: (one is besides, one.state is not State.READY, one.num_in_flight))
        replica.num_in_flight += 1
        return Chosen(replica, None)

    def ended(self, chosen: Chosen) -> None:
        """The request that it was chosen for."""
        replica, of_router = chosen
        replica.num_in_flight -= 1
        if of_router == replica.num_shunned:
            self._router.ended(replica.name)

    def refused(self, replica: Replica) -> None:
        """It took no connection: nothing listens there any more."""
        if not replica.is_leaving:
            self._shun(replica, State.LOST)

    def stops(self, replica: Replica) -> None:
        """By its own word it takes nothing more, and is about to end."""
        if self._known.get(replica.name) is replica:
            self.leave(replica.name)

    # ---- how they are ----

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
                pass  # one question without an answer says little
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
        question = self._http.get(f"{replica.url}/figures", params=parameters, headers=self._headers, timeout=ANSWER_S)
        # One that trickles is no answer either.
        async with asyncio.timeout(ANSWER_S):
            return await question

    def _take(self, replica: Replica, reply: httpx.Response) -> None:
        try:
            self._heard(replica, reply)
        except UNREADABLE as error:
            if replica.state is not State.CLOSED:
                logger.error("%s says what cannot be read: %s: %s", replica.name, type(error).__name__, error)
            self._shun(replica, State.CLOSED)

    def _heard(self, replica: Replica, reply: httpx.Response) -> None:
        replica.lost.clear()
        if replica.is_leaving:
            return
        if reply.status_code != 200:
            self._shun(replica, State.CLOSED)
            return
        reported = reply.json()
        self.block_size = reported["block_size"]
        self._router.report(replica.name, replica.take_figures(reported, self._loop.time()))
        replica.has_served = True
        self._note(replica, State.READY)

    async def backlog(self) -> list[Backlog] | None:
        """What is left of the batches that all of them share, deadlines on the loop's clock; None if nobody says."""
        ready = [replica for replica in self._known.values() if replica.state is State.READY]
        for replica in ready[:ASKED_FOR_BACKLOG]:
            question = self._http.get(f"{replica.url}/backlog", headers=self._headers, timeout=ANSWER_S)
            try:
                async with asyncio.timeout(ANSWER_S):
                    reply = (await question).raise_for_status().json()
                now_s = self._loop.time()
                return [Backlog(now_s + one["left_seconds"], one["work_seconds"]) for one in reply["jobs"]]
            except (httpx.HTTPError, TimeoutError, *UNREADABLE):
                continue
        return None

    def _shun(self, replica: Replica, state: State) -> None:
        self._router.leave(replica.name)
        replica.num_shunned += 1
        self._note(replica, state)

    def _note(self, replica: Replica, state: State) -> None:
        if state is not replica.state:
            replica.since_s = self._loop.time()
            level = logging.WARNING if state is State.LOST else logging.INFO
            logger.log(level, "%s at %s is %s", replica.name, replica.url, state)
            replica.state = state
            news, self._news = self._news, asyncio.Event()
            news.set()


def no_replica() -> UnavailableError:
    """The error while nobody takes requests."""
    return UnavailableError("No replica takes requests now; try again in a few seconds.", code="no_replica")

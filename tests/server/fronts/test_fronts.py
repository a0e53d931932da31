"""A front process and its owner in one process, over a real socket pair: races, deaths and what is given back."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

import pytest

from neaptide.engine.messages import AddRequest, RequestOutput
from neaptide.engine.params import FinishReason, RequestClass, SamplingParams, Tier
from neaptide.server.context import Admission
from neaptide.server.engine_client.client import EngineClient, EngineUnavailableError
from neaptide.server.fronts import owner as owner_module
from neaptide.server.fronts.front import FrontAdmission, FrontCounts, FrontMetrics, OwnerPeer, Tallies
from neaptide.server.fronts.messages import AcceptKeys, EnterQueue
from neaptide.server.fronts.owner import LOOK_S, LOST, FrontPeer, OwnerParts
from neaptide.server.http.auth import KeyRing, parse_keys
from neaptide.server.http.errors import OverloadedError
from neaptide.server.limits.counts import Taken
from neaptide.server.limits.usage import KeyLimits, LimitName
from neaptide.server.observe.timing import ChoiceTiming, RequestTiming
from tests.patience import until
from tests.server.conftest import Server
from tests.server.engine_client.loop_clock import LoopClock
from tests.server.fake_engine import hashed_token, ready

ONLINE = RequestClass.ONLINE
LIMITS = KeyLimits(tokens_per_day=10)
EXPECTED = [hashed_token([7, 8], None, position) for position in range(3)]
"""Tokens of ``request``."""
TOKENS = LimitName.TOKENS_PER_DAY


class FakeProcess:
    returncode: int | None = None
    is_killed = False

    def kill(self) -> None:
        self.is_killed = True


@dataclass
class Pair:
    """The owner's app with a fake engine, and the parts of one front process."""

    owner: Server
    peer: FrontPeer
    process: FakeProcess
    front: OwnerPeer
    client: EngineClient
    keys: KeyRing
    admission: FrontAdmission
    counts: FrontCounts
    tallies: Tallies
    metrics: FrontMetrics

    def used(self) -> int:
        """Tokens of the day that the owner has counted for the key."""
        return self.owner.app.state.limiter.counts.levels("key", LIMITS)[TOKENS].used

    async def die(self) -> None:
        """Ends the front process as seen by the owner."""
        self.front.link.close()
        await self.peer.link.closed
        self.owner.context.client.remove_relay(self.peer)
        await self.peer.release()


def request(name: str = "r-0", max_tokens: int = 3) -> AddRequest:
    return AddRequest(name, [7, 8], SamplingParams(max_tokens=max_tokens), Tier.DEFAULT, 0.0, 1.0, 1.0)


@pytest.fixture
async def pair(server: Server) -> AsyncIterator[Pair]:
    state = server.app.state
    parts = OwnerParts(context=server.context, metrics=state.metrics, limiter=state.limiter, keys=state.keys)
    server.context.admission = Admission(max_online=2, max_offline=2)
    process, client, keys = FakeProcess(), EngineClient(), KeyRing()
    peer = FrontPeer(parts, cast(asyncio.subprocess.Process, process))
    front = OwnerPeer(client, keys, lambda: None)
    for end, link in zip(socket.socketpair(), (peer.link, front.link), strict=True):
        await asyncio.get_running_loop().create_connection(lambda link=link: link, sock=end)
    tallies = Tallies(front, lambda: 0)
    metrics = FrontMetrics(front, tallies)
    admission = FrontAdmission(front, 2, 2)
    server.context.client.add_relay(peer)
    await until(lambda: client.is_ready)
    counts = FrontCounts(front, tallies)
    yield Pair(server, peer, process, front, client, keys, admission, counts, tallies, metrics)
    for link in (peer.link, front.link):
        link.close()
        await link.closed


async def tokens_of(client: EngineClient, added: AddRequest) -> list[int]:
    """Tokens of a request; outputs that come together are merged."""
    outputs = [output async for output in client.generate(added)]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    return [token for output in outputs for token in output.new_token_ids]


async def test_outputs_come_through_the_owner(pair: Pair) -> None:
    assert await tokens_of(pair.client, request()) == EXPECTED
    assert [one.request_id for one in pair.owner.engine.requests] == ["r-0"]


async def test_leaving_early_aborts_in_the_engine(pair: Pair) -> None:
    pair.owner.engine.delay_s = 0.001
    outputs = pair.client.generate(request(max_tokens=1000))
    await anext(outputs)
    await outputs.aclose()
    await until(lambda: pair.owner.engine.aborts == [("r-0", FinishReason.ABORT)])


async def test_a_waiting_request_is_given_to_the_next_engine(pair: Pair) -> None:
    engine = pair.owner.engine
    engine.released.clear()
    found = asyncio.ensure_future(tokens_of(pair.client, request()))
    await until(lambda: engine.num_running == 1)
    engine.die(in_step=False)
    await until(lambda: not pair.client.is_ready)
    engine.released.set()
    engine.attach()
    assert await found == EXPECTED
    assert len(engine.requests) == 2


async def test_a_request_of_the_last_step_fails(pair: Pair) -> None:
    pair.owner.engine.die_after = 0
    with pytest.raises(EngineUnavailableError) as caught:
        await tokens_of(pair.client, request())
    assert caught.value.may_have_caused_it


async def test_the_engine_gets_a_request_once(pair: Pair) -> None:
    """A front that learns late of an engine's end sends what the next engine has already."""
    pair.owner.engine.released.clear()
    for _ in range(2):
        pair.front.send(request())
    pair.front.send(request("last-0"))
    await until(lambda: pair.owner.engine.num_running == 2)
    assert [one.request_id for one in pair.owner.engine.requests] == ["r-0", "last-0"]


async def test_the_bound_of_the_queue_is_the_owners(pair: Pair) -> None:
    pair.owner.context.admission.enter(ONLINE, "", 1)
    await pair.admission.admit(ONLINE, "", 1)
    with pytest.raises(OverloadedError):
        await pair.admission.admit(ONLINE, "", 1)
    pair.admission.leave(ONLINE, "", 1)
    await until(lambda: pair.owner.context.admission.count(ONLINE) == 1)
    await pair.admission.admit(ONLINE, "", 1)


async def test_a_request_that_leaves_while_it_asks_holds_no_place(pair: Pair) -> None:
    asking = asyncio.ensure_future(pair.admission.admit(ONLINE, "", 2))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await pair.admission.admit(ONLINE, "", 2)  # the owner reads in order
    assert pair.owner.context.admission.count(ONLINE) == 2


async def test_amounts_of_a_key_are_the_owners(pair: Pair) -> None:
    amounts = dict.fromkeys(LimitName, 6)
    taken = await pair.counts.take("key", LIMITS, amounts)
    assert isinstance(taken, Taken)
    assert pair.counts.levels("key", LIMITS)[TOKENS].used == pair.used() == 6
    refused = await pair.counts.take("key", LIMITS, amounts)
    assert not isinstance(refused, Taken)
    assert (refused.name, refused.limit, refused.used, refused.wanted) == (TOKENS, 10, 6, 6)
    pair.counts.add("key", {TOKENS: 1})
    pair.tallies.send()
    taken.by.give_back("key", {TOKENS: 4}, taken.place)
    await until(lambda: pair.used() == 3)


async def test_amounts_of_a_request_that_leaves_while_it_asks_are_returned(pair: Pair) -> None:
    asking = asyncio.ensure_future(pair.counts.take("key", LIMITS, dict.fromkeys(LimitName, 6)))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert isinstance(await pair.counts.take("key", LIMITS, dict.fromkeys(LimitName, 10)), Taken)


async def test_the_owner_releases_what_a_dead_process_held(pair: Pair) -> None:
    metrics, engine = pair.owner.app.state.metrics, pair.owner.engine
    engine.released.clear()
    await pair.admission.admit(ONLINE, "", 2)
    await pair.counts.take("key", LIMITS, dict.fromkeys(LimitName, 6))
    pair.metrics.on_begun(Tier.DEFAULT, RequestTiming(0.0, [ChoiceTiming()]))
    pair.front.send(request())
    await until(lambda: engine.num_running == 1)
    assert metrics.num_in_flight == {"default": 1}
    await pair.die()
    assert pair.owner.context.admission.count(ONLINE) == 0
    assert pair.used() == 0
    assert metrics.num_in_flight["default"] == 0
    assert metrics.silent(1.0) == (0, 0.0)
    assert engine.aborts == [("r-0", FinishReason.ABORT)]
    labels = {"tier": "default", "endpoint": "unknown", "outcome": "server_error"}
    assert metrics.requests.labels(**labels)._value.get() == 1
    assert LOST == "api_process_lost"


async def test_the_owner_knows_which_requests_wait_for_a_token(pair: Pair) -> None:
    metrics = pair.owner.app.state.metrics
    timing = RequestTiming(5.0, [ChoiceTiming()])
    pair.metrics.on_begun(Tier.DEFAULT, timing)
    await until(lambda: metrics.silent(7.0) == (1, 2.0))
    timing.choices[0].first_s = 6.0
    pair.tallies.send()
    await until(lambda: metrics.silent(7.0) == (0, 0.0))


async def test_a_process_that_does_not_read_is_killed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "MAX_UNSENT_BYTES", 1 << 20)
    output = RequestOutput("r-0", [1] * 100_000)
    for _ in range(20):  # nothing reads while this task runs
        pair.peer.give(output)
        pair.peer.flush()
    assert pair.process.is_killed


async def test_a_process_that_falls_silent_is_killed(pair: Pair, loop_clock: LoopClock) -> None:
    pair.tallies.send(is_sign_of_life=True)
    watching = asyncio.ensure_future(pair.peer.until_ended())
    killed = []
    for _ in range(4):
        await loop_clock.pass_s(LOOK_S)
        killed.append(pair.process.is_killed)
    assert killed == [False, False, True, True]
    watching.cancel()


async def test_changed_keys_are_accepted(pair: Pair) -> None:
    pair.peer.tell(AcceptKeys(parse_keys(["one:flex:admin:x2"])))
    await pair.front.has_keys.wait()
    assert pair.keys.principals == [one.principal for one in parse_keys(["one:flex:admin:x2"])]


async def test_frames_arrive_whole_whatever_their_size(pair: Pair) -> None:
    """A prompt larger than a read, between two short messages."""
    pair.owner.engine.released.clear()
    long = AddRequest("long-0", list(range(300_000)), SamplingParams(), Tier.DEFAULT, 0.0, 1.0, 1.0)
    pair.front.send(long)
    assert await pair.front.enter(EnterQueue(pair.front.number(), ONLINE, "", 1))
    assert pair.owner.engine.requests == [long]


async def test_a_front_sends_nothing_else_to_the_engine(pair: Pair) -> None:
    with pytest.raises(TypeError):
        pair.client.set_offline(True)
    assert ready().max_model_len == pair.client.info.max_model_len

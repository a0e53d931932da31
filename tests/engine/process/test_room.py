"""What an engine says of its room, when it is asked."""

from collections.abc import Sequence

from neaptide.engine.kv.cache_digest import KEY_BYTES, digest_of
from neaptide.engine.messages import EngineReady, FromEngine, Room, Shutdown, StepOutputs, TellRoom, ToEngine
from neaptide.engine.process.loop import run_engine
from neaptide.engine.scheduler.online_room import online_room
from neaptide.engine.scheduler.packing import LOOK_AHEAD
from neaptide.estimator.cost.roofline import RooflineModel
from tests.engine.harness import Harness, online

READY = EngineReady("", "", "", 0, 0, 0, 0, [])


class Script:
    """Source and sink of the engine's loop: hands out one list of messages whenever the engine is idle, then the end;
    notes what room it has been told of."""

    def __init__(self, harness: Harness, *messages: Sequence[ToEngine]) -> None:
        self._harness = harness
        self._messages = list(messages)
        self.rooms: list[Room] = []

    def poll(self, timeout_s: float) -> Sequence[ToEngine]:
        self._harness.clock.sleep_until(self._harness.clock.now() + timeout_s)
        if self._harness.core.has_work:
            return []
        return self._messages.pop(0) if self._messages else [Shutdown()]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs) and message.room is not None:
            self.rooms.append(message.room)


def asked(harness: Harness, *messages: Sequence[ToEngine]) -> list[Room]:
    script = Script(harness, *messages)
    run_engine(harness.core, READY, script, script, harness.clock)
    return script.rooms


def test_an_idle_engine_has_the_whole_target_and_says_so_once_for_all_who_ask() -> None:
    harness = Harness(ttft_slo_s=0.5)
    (room,) = asked(harness, [TellRoom(False), TellRoom(False)])
    assert room.free_slack_s == 0.5 - harness.core.scheduler.config.delivery_latency_s
    assert room.cached is None
    assert asked(harness, []) == []


def test_what_waits_takes_its_time_from_the_slack() -> None:
    """The question comes with two prompts. After the step that computes the first, the second is ahead."""
    harness = Harness(cost_model=RooflineModel(), max_num_batched_tokens=64)
    chats = [online(f"c{k}", [k + 1] * 60, max_tokens=2, ttft_slo_s=5.0) for k in range(2)]
    for chat in chats:
        harness.core.handle(chat)
    idle = online_room(Harness(cost_model=RooflineModel()).core.scheduler).free_slack_s
    harness.core.step()
    after_a_step = online_room(harness.core.scheduler).free_slack_s
    assert after_a_step < idle
    again = Harness(cost_model=RooflineModel(), max_num_batched_tokens=64)
    (room,) = asked(again, [*chats, TellRoom(False)])
    assert room.free_slack_s == after_a_step


def test_prompts_far_back_in_a_crowd_are_not_hashed_for_it() -> None:
    """That would stop every stream for as long as it takes."""
    harness = Harness(num_blocks=256, max_num_batched_tokens=8)
    for k in range(LOOK_AHEAD + 9):
        harness.core.handle(online(f"c{k}", [k + 1] * 60))
    online_room(harness.core.scheduler)
    hashed = [bool(request.block_hashes) for request in harness.core.scheduler.queues.waiting_online]
    assert hashed == [True] * LOOK_AHEAD + [False] * 9


def test_what_the_cache_holds_is_told_only_if_that_is_asked() -> None:
    harness = Harness(num_blocks=256)
    prompt = list(range(10, 810))
    first, second = asked(harness, [online("a", prompt)], [TellRoom(False)], [TellRoom(True)])
    expected = digest_of(harness.core.kv.indexed_hashes())
    assert len(expected) > 10
    assert first.cached is None
    assert second.cached is not None
    found = {second.cached[k : k + KEY_BYTES] for k in range(0, len(second.cached), KEY_BYTES)}
    assert (found, len(second.cached)) == (expected, KEY_BYTES * len(expected))


def test_prompts_that_were_computed_and_streams_are_load() -> None:
    harness = Harness(cost_model=RooflineModel(), tpot_slo_s=0.1)
    (first, second) = asked(harness, [TellRoom(False)], [online("a", [1] * 60, max_tokens=3), TellRoom(False)])
    assert first.online_load == 0.0
    room = online_room(harness.core.scheduler)
    assert second.online_load >= 6.0 * room.alone_token_s > 0.0

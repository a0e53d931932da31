"""The waits of batches and lines: sums of the device's time, and the sentence."""

from neaptide.engine.messages import RecentSteps, RequestOutput, StepOutputs
from neaptide.engine.params import FinishReason
from neaptide.engine.scheduler.draft import Limit
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.why.batches import BatchWait, batch_wait
from neaptide.server.why.device_time import (
    BUCKET_S,
    KEPT_S,
    MAX_KEYS,
    OTHER_KEYS,
    DeviceTimeSums,
    DeviceUse,
    LineStarts,
)
from tests.server.fake_engine import FakeEngine
from tests.server.why.timeline import OTHER, Timeline

START_S = 1_000_000.0
HOUR_S = 3600.0
A, B = "aaaaaaaa", "bbbbbbbb"


class Day:
    """A server's device time on a wall clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.client = EngineClient()
        self.device = DeviceTimeSums(self.client, lambda: self.now_s)
        self.engine = FakeEngine(self.client)
        self.engine.attach()

    def run(self, seconds: float, chats: float = 0.0, *, paused: bool = False, **keys: float) -> None:
        """So much time, in reports of a bucket each, of which these shares went to chats and to keys."""
        for _ in range(round(seconds / BUCKET_S)):
            offline_s = {share: BUCKET_S * part for share, part in keys.items()}
            report = RecentSteps(0.0, 16, [], [], BUCKET_S * chats, offline_s, paused, float(BUCKET_S))
            self.client.on_message(StepOutputs([], [], recent=report))
            self.now_s += BUCKET_S

    def wait(self, start_s: float, end_s: float, share: str = A, *, is_line: bool = True) -> BatchWait:
        return batch_wait(self.device.between(start_s, end_s), share, 0.0, "turn of key {}".format, is_line=is_line)


def test_a_line_waited_for_chats_and_for_the_turn_of_another_key() -> None:
    day = Day()
    day.run(3 * HOUR_S, chats=0.7, **{B: 0.3})
    wait = day.wait(START_S, day.now_s)
    assert wait.sentence == f"waited 3 h: chats 2.1 h, turn of key {B} 54 min"
    assert round(wait.total_s) == 3 * HOUR_S


def test_a_batch_took_its_own_work_and_what_was_in_its_way() -> None:
    day = Day()
    day.run(HOUR_S, chats=0.5, **{A: 0.25, B: 0.25})
    day.run(HOUR_S, chats=0.25, paused=True)
    day.engine.die()
    day.now_s += HOUR_S
    day.engine.attach()
    day.run(HOUR_S, **{A: 1.0})
    used = day.device.between(START_S, day.now_s)
    hours = {what: round(seconds / HOUR_S, 3) for what, seconds in used.uses.items() if seconds}
    assert hours == {DeviceUse.CHATS: 0.75, DeviceUse.PAUSED: 0.75, DeviceUse.ENGINE_GONE: 1.0}
    assert {share: seconds / HOUR_S for share, seconds in used.keys.items()} == {A: 1.25, B: 0.25}
    assert day.wait(START_S, day.now_s, is_line=False).sentence == (
        f"took 4 h: work of its own key 75 min, no engine 60 min, chats 45 min, batch work was paused 45 min, "
        f"turn of key {B} 15 min"
    )


def test_chats_whose_memory_left_none() -> None:
    day = Day()
    time = Timeline()
    time.step(5000, streams=(OTHER,), offline_limit=Limit.MEMORY, online_blocks=900, offline_blocks=10)
    time.step(5000, streams=(OTHER,), offline_limit=Limit.TIME, online_blocks=900, offline_blocks=10)
    report = RecentSteps(0.0, 16, time.steps, [], 10.0)
    day.client.on_message(StepOutputs([], [], recent=report))
    uses = day.device.between(START_S, START_S + BUCKET_S).uses
    assert (uses[DeviceUse.MEMORY], uses[DeviceUse.CHATS]) == (5.0, 5.0)


def test_what_was_before_the_server_is_not_recorded_and_idle_time_is_the_engines() -> None:
    day = Day()
    day.now_s += 60
    used = day.device.between(START_S - 60, day.now_s)
    assert {use: seconds for use, seconds in used.uses.items() if seconds} == {
        DeviceUse.NOT_RECORDED: 60,
        DeviceUse.BETWEEN: 60,
    }


def test_the_record_is_bounded_in_time_and_in_keys() -> None:
    day = Day()
    day.run(BUCKET_S, **{f"key{number}": 0.05 for number in range(MAX_KEYS + 4)})
    assert len(day.device.between(START_S, day.now_s).keys) == MAX_KEYS + 1
    assert round(day.device.between(START_S, day.now_s).keys[OTHER_KEYS], 3) == 2.0
    day.engine.die()
    day.engine.attach()
    day.now_s += KEPT_S + BUCKET_S
    day.run(2 * BUCKET_S, chats=1.0)
    assert not day.device._gone
    assert day.device.between(START_S, START_S + BUCKET_S).uses[DeviceUse.NOT_RECORDED] == BUCKET_S


def test_a_line_that_has_ended_keeps_when_it_was_first_scheduled() -> None:
    client = EngineClient()
    lines = LineStarts(client, lambda: 50.0, lambda: START_S)
    ended = RequestOutput("batch_x:7", [1], finish_reason=FinishReason.STOP, scheduled_s=40.0)
    client.on_message(StepOutputs([RequestOutput("batch_x:8", [1], scheduled_s=40.0), ended], []))
    assert lines.started_s("batch_x:7") == START_S - 10.0
    assert lines.started_s("batch_x:8") is None

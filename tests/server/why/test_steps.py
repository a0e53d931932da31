"""The ring of steps: what it keeps, for how long, in how much memory."""

import msgspec
import pytest

from neaptide.engine.messages import RecentSteps, StepOutputs
from neaptide.server.engine_client.client import EngineClient
from neaptide.server.why.steps import CHUNK_STEPS, KEPT_S, StepRing
from tests.server.fake_engine import FakeEngine
from tests.server.why.timeline import OTHER, OWN, Timeline

STEP_S = 0.05
ALL = (0.0, 1e9)


class Recording:
    """A ring with a clock that the test turns, and an engine that takes 50 ms for a step."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.now_s = 0.0
        self.client = EngineClient()
        self.ring = StepRing(self.client, lambda: self.now_s, max_bytes)
        self.engine = FakeEngine(self.client)
        self.engine.attach()

    def run(self, num_steps: int) -> None:
        """Steps, each reported by itself."""
        for _ in range(num_steps):
            time = Timeline(now_ms=1e3 * self.now_s)
            time.step(1e3 * STEP_S, streams=(OTHER,))
            self.now_s += STEP_S
            report = RecentSteps(self.now_s, 16, time.steps, [(OTHER, self.now_s, 5)])
            self.client.on_message(StepOutputs([], [], recent=report))

    def ends_s(self, start_s: float = 0.0, end_s: float = 1e9) -> list[float]:
        around = self.ring.cut(start_s, end_s).read(OWN, (), start_s, end_s)
        return [round(step.end_s, 3) for step in around.steps]


def test_steps_come_back_in_order_compressed_or_not() -> None:
    recording = Recording()
    recording.run(CHUNK_STEPS + 3)
    assert recording.ends_s() == [round(STEP_S * (index + 1), 3) for index in range(CHUNK_STEPS + 3)]
    around = recording.ring.cut(*ALL).read(OWN, (7,), *ALL)
    assert (around.block_size, around.since_s, around.ids) == (16, 0.0, {7: OWN})
    assert around.taken_s == {OTHER: recording.now_s}


def test_a_cut_has_the_steps_of_its_time_and_a_little_before() -> None:
    recording = Recording()
    recording.run(1000)
    found = recording.ends_s(30.0, 31.0)
    assert (found[0], found[-1]) == (20.0, 31.0)
    assert len(recording.ring.cut(30.0, 31.0).chunks) <= 3


def test_what_is_older_than_fifteen_minutes_is_dropped() -> None:
    recording = Recording()
    recording.run(CHUNK_STEPS)
    recording.now_s += KEPT_S + 1.0
    recording.run(CHUNK_STEPS)
    found = recording.ring.cut(*ALL).read(OWN, (), *ALL)
    assert len(found.steps) == CHUNK_STEPS
    assert found.since_s == pytest.approx(CHUNK_STEPS * STEP_S)


def test_memory_is_bounded() -> None:
    recording = Recording(max_bytes=10_000)
    recording.run(40 * CHUNK_STEPS)
    assert recording.ring.num_bytes <= 10_000
    kept = recording.ring.cut(*ALL).read(OWN, (), *ALL)
    assert 0 < len(kept.steps) < 40 * CHUNK_STEPS
    assert kept.since_s > 0


def test_another_engine_begins_another_record() -> None:
    """Numbers of admissions start again with each engine."""
    recording = Recording()
    recording.run(4)
    recording.now_s = 1.0
    recording.engine.die()
    recording.now_s = 3.0
    recording.engine.attach()
    recording.run(2)
    assert recording.ends_s() == [3.05, 3.1]
    assert recording.ends_s(0.0, 0.9) == [0.05, 0.1, 0.15, 0.2]
    assert recording.ring.gone(0.5, 9.0) == ((1.0, 3.0),)
    assert recording.ring.gone(3.5, 9.0) == ()
    assert recording.ring.cut(0.0, 9.0).since_s == 3.0


def test_admissions_are_kept_until_their_request_ends() -> None:
    recording = Recording()
    time = Timeline()
    time.step(10, prompts={OWN: 5}, admits=3)
    time.step(10, prompts={OWN: 5}, admits=4)
    report = RecentSteps(0.02, 16, time.steps, [])
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=RecentSteps)
    recording.client.on_message(StepOutputs([], [], recent=decoded))
    assert recording.ring.take_admissions(OWN) == (3, 4)
    assert recording.ring.take_admissions(OWN) == ()


def test_an_admission_that_is_reported_after_the_end_of_its_request_is_not_kept() -> None:
    recording = Recording()
    assert recording.ring.take_admissions(OWN) == ()
    time = Timeline()
    time.step(10, prompts={OWN: 5}, admits=3)
    recording.client.on_message(StepOutputs([], [], recent=RecentSteps(0.01, 16, time.steps, [])))
    assert recording.ring.take_admissions(OWN) == ()


def test_of_ended_requests_only_the_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neaptide.server.why.steps.MAX_ENDED", 2)
    ring = Recording().ring
    for number in range(9):
        ring.take_admissions(f"request {number}")
    assert list(ring._ended) == ["request 7", "request 8"]

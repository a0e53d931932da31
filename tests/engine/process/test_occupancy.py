"""What the engine says that it has, when no step is there to tell it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from neaptide.engine.messages import (
    AbortRequest,
    CancelBatch,
    EngineReady,
    FromEngine,
    Occupancy,
    Shutdown,
    StepOutputs,
    StepStats,
    ToEngine,
)
from neaptide.engine.process.loop import run_engine
from tests.engine.harness import Harness, batch, online

READY = EngineReady("", "", "", 0, 0, 0, 0, [])
NUM_BLOCKS = 64


class Line:
    """Source and sink of the engine's loop: hands out what is due at each poll, then the end; keeps what was said last
    of what the engine has, as whoever shows it does."""

    def __init__(self, harness: Harness, *polls: Sequence[ToEngine]) -> None:
        self._harness = harness
        self._polls = list(polls)
        self.shown: list[Occupancy | StepStats | None] = []
        """Before each poll."""
        self._last: Occupancy | StepStats | None = None

    def poll(self, timeout_s: float) -> Sequence[ToEngine]:
        self._harness.clock.sleep_until(self._harness.clock.now() + timeout_s)
        self.shown.append(self._last)
        return self._polls.pop(0) if self._polls else [Shutdown()]

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            for stats in message.stats:
                self._last = stats
            self._last = message.occupancy or self._last


def shown(harness: Harness, *polls: Sequence[ToEngine]) -> list[Occupancy | StepStats | None]:
    line = Line(harness, *polls)
    run_engine(harness.core, READY, line, line, harness.clock)
    return line.shown


@pytest.mark.parametrize("overlap_depth", [0, 1])
def test_clients_that_leave_between_steps_are_gone_at_once(overlap_depth: int) -> None:
    harness = Harness(num_blocks=NUM_BLOCKS, overlap_depth=overlap_depth)
    chats = [online(f"r{k}", list(range(8 * k, 8 * k + 8)), max_tokens=99) for k in range(5)]
    told = shown(harness, chats, [], [], [], [AbortRequest([chat.request_id for chat in chats])], [])
    running, idle = told[4], told[5 + overlap_depth]
    assert running is not None
    assert idle is not None
    assert running.running_online == 5
    assert running.blocks_online >= 10
    assert (idle.running_online, idle.waiting_online, idle.blocks_online) == (0, 0, 0)
    assert idle.blocks_free + idle.blocks_cached == NUM_BLOCKS


def test_a_fresh_engine_says_what_it_has_before_anything_comes() -> None:
    _, fresh = shown(Harness(num_blocks=NUM_BLOCKS, headroom_ratio=0.25), [])
    assert fresh == Occupancy(0, 0, 0, 0, NUM_BLOCKS, 0, 0, 0, NUM_BLOCKS // 4)


def test_rows_of_a_cancelled_batch_are_gone_at_once(tmp_path: Path) -> None:
    harness = Harness(num_blocks=NUM_BLOCKS, max_num_seqs=4)
    rows = batch(tmp_path, "b", [[k] * 8 for k in range(20)], max_tokens=99)
    told = shown(harness, [rows], [], [], [CancelBatch("b")], [], [])
    before, after = told[3], told[4]
    assert before is not None
    assert after is not None
    assert (before.running_offline, before.waiting_offline) == (4, 16)
    assert (after.running_offline, after.waiting_offline, after.blocks_offline) == (0, 0, 0)


def test_a_step_tells_it_by_itself() -> None:
    harness, told = Harness(), list[StepOutputs]()

    class Sink:
        def send(self, message: FromEngine) -> None:
            if isinstance(message, StepOutputs):
                told.append(message)

    line = Line(harness, [online("a", [7] * 8, max_tokens=3)], [], [])
    run_engine(harness.core, READY, line, Sink(), harness.clock)
    with_stats = [message for message in told if message.stats]
    assert with_stats
    assert all(message.occupancy is None for message in with_stats)

"""The headroom predictor hears of what online work gives back even when no further step is planned."""

from neaptide.engine.messages import AbortRequest
from tests.engine.harness import Harness, online


def held_blocks(harness: Harness) -> int:
    return harness.core.scheduler.headroom.headroom_blocks(harness.clock.now())


def test_the_end_of_the_last_online_request_is_observed() -> None:
    harness = Harness()
    harness.core.handle(online("a", [7] * 9, max_tokens=1))
    harness.step()
    assert not harness.core.has_work
    assert held_blocks(harness) == 0


def test_the_abort_of_the_last_online_request_is_observed() -> None:
    harness = Harness()
    harness.core.handle(online("a", [7] * 9, max_tokens=9))
    harness.step()
    assert held_blocks(harness) == 3
    harness.core.handle(AbortRequest(["a"]))
    assert held_blocks(harness) == 0


def test_every_step_says_what_is_kept_for_online_work() -> None:
    harness = Harness()
    harness.core.handle(online("a", [7] * 9, max_tokens=9))
    (stats,) = harness.core.step().stats
    assert stats.blocks_reserved == held_blocks(harness) == 3

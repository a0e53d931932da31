"""A row that needs more of the cache than is free: others run meanwhile, and it does not wait for ever."""

from pathlib import Path

from neaptide.engine.messages import CancelBatch
from neaptide.engine.scheduler.offline_fill import PATIENCE_S
from tests.engine.harness import Harness, batch, online

GIANT_TOKENS = 120
"""Thirty of forty blocks."""


def busy_harness(tmp_path: Path, num_small: int) -> Harness:
    """A chat that holds half of the cache, a giant behind it, and small rows behind that."""
    harness = Harness(num_blocks=40, offline_max_kv_ratio=0.9)
    harness.core.handle(online("chat", [7] * 80, max_tokens=8, tpot_slo_s=10.0))
    for _ in range(3):  # until it has time to spare
        harness.step()
    rows = [[k + 10] * GIANT_TOKENS if k == 0 else [k + 10] * 8 for k in range(num_small + 1)]
    harness.core.handle(batch(tmp_path, "job", rows, max_tokens=1))
    return harness


def test_it_is_passed_by_while_it_finds_no_room(tmp_path: Path) -> None:
    harness = busy_harness(tmp_path, 3)
    assert set(harness.step()) == {"chat", "job:1", "job:2", "job:3"}


def test_it_runs_when_there_is_room(tmp_path: Path) -> None:
    harness = busy_harness(tmp_path, 3)
    harness.run()
    assert harness.log[-2] == ("start", "job:0")


def test_more_and_more_is_kept_free_for_it(tmp_path: Path) -> None:
    harness = busy_harness(tmp_path, 30)
    harness.step()
    early = sum(event == "start" for event, _ in harness.log)
    assert early > 5
    harness.clock.sleep_until(harness.clock.now() + PATIENCE_S)
    assert set(harness.step()) == {"chat"}
    harness.core.check_integrity()


def test_one_whose_batch_is_cancelled_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    harness = busy_harness(tmp_path, 1)
    harness.step()
    harness.core.handle(CancelBatch("job"))
    harness.core.handle(
        batch(tmp_path, "next", [[k + 50] * (8 if k else GIANT_TOKENS) for k in range(30)], max_tokens=1)
    )
    harness.step()
    harness.clock.sleep_until(harness.clock.now() + PATIENCE_S)
    assert set(harness.step()) == {"chat"}


def test_a_row_that_is_only_a_little_too_large_is_waited_for(tmp_path: Path) -> None:
    harness = Harness(num_blocks=80, offline_max_kv_ratio=0.9)
    harness.core.handle(online("chat", [7] * 300, max_tokens=8, tpot_slo_s=10.0))
    for _ in range(3):
        harness.step()
    harness.core.handle(batch(tmp_path, "job", [[10] * 17, [11] * 2], max_tokens=1))
    assert set(harness.step()) == {"chat"}

"""A row that needs more of the cache than is free: others run meanwhile, and it does not wait for ever."""

from pathlib import Path

from neaptide.engine.messages import AbortRequest, CancelBatch
from neaptide.engine.scheduler.offline_fill import PATIENCE_S
from tests.engine.harness import Harness, batch, online

GIANT_TOKENS = 120
"""Thirty of forty blocks."""


GIANT = 5
"""Its place in a batch where small rows hold what it needs."""


def rows(num_small: int, giant: int = 0, first_token: int = 10) -> list[list[int]]:
    return [[k + first_token] * (GIANT_TOKENS if k == giant else 8) for k in range(num_small + 1)]


def busy_harness(tmp_path: Path, num_small: int) -> Harness:
    """A chat that holds half of the cache, a giant behind it, and small rows behind that."""
    harness = Harness(num_blocks=40, offline_max_kv_ratio=0.9)
    add_chat(harness, "chat", 80)
    harness.core.handle(batch(tmp_path, "job", rows(num_small), max_tokens=1))
    return harness


def harness_of_rows(tmp_path: Path, num_small: int, max_tokens: int) -> Harness:
    """A small chat, and rows that hold what the giant needs."""
    harness = Harness(num_blocks=40, offline_max_kv_ratio=0.9)
    add_chat(harness, "chat", 4)
    harness.core.handle(batch(tmp_path, "job", rows(num_small, GIANT), max_tokens))
    return harness


def add_chat(harness: Harness, name: str, num_tokens: int) -> None:
    now_s = harness.clock.now()
    harness.core.handle(online(name, [7] * num_tokens, max_tokens=36, arrival_s=now_s, tpot_slo_s=1000.0))
    for _ in range(3):  # until it has time to spare
        harness.step()


def have_begun(harness: Harness) -> int:
    return sum(event == "start" and ":" in name for event, name in harness.log)


def test_it_is_passed_by_while_it_finds_no_room(tmp_path: Path) -> None:
    harness = busy_harness(tmp_path, 3)
    assert set(harness.step()) == {"chat", "job:1", "job:2", "job:3"}


def test_it_runs_when_there_is_room(tmp_path: Path) -> None:
    harness = busy_harness(tmp_path, 3)
    harness.run()
    assert harness.log[-2] == ("start", "job:0")


def begin_giant(harness: Harness, name: str) -> None:
    """Until it begins none does that has not by now."""
    num_before = have_begun(harness)
    while ("start", name) not in harness.log:
        assert have_begun(harness) == num_before
        harness.step()


def test_more_and_more_is_kept_free_for_it_where_only_rows_are_in_its_way(tmp_path: Path) -> None:
    harness = harness_of_rows(tmp_path, 200, max_tokens=9)
    for _ in range(12):
        harness.step()
    assert have_begun(harness) > 10
    harness.clock.sleep_until(harness.clock.now() + PATIENCE_S)
    begin_giant(harness, f"job:{GIANT}")


def test_nothing_is_kept_for_it_while_online_work_alone_is_in_its_way(tmp_path: Path) -> None:
    """Else a row that cannot fit stops all others for as long as chats come."""
    harness = busy_harness(tmp_path, 100)
    harness.step()
    for _ in range(3):
        harness.clock.sleep_until(harness.clock.now() + PATIENCE_S)
        num_before = have_begun(harness)
        harness.step()
        assert have_begun(harness) > num_before
    harness.core.handle(AbortRequest(["chat"]))  # night
    harness.run()
    assert ("start", "job:0") in harness.log
    assert len(harness.ends) == 102


def test_what_was_kept_in_vain_is_not_kept_again_at_once(tmp_path: Path) -> None:
    harness = harness_of_rows(tmp_path, 400, max_tokens=9)
    for _ in range(12):
        harness.step()
    harness.clock.sleep_until(harness.clock.now() + PATIENCE_S)
    harness.step()
    add_chat(harness, "second", 40)  # now it cannot fit
    harness.core.handle(AbortRequest(["second"]))
    harness.clock.sleep_until(harness.clock.now() + 0.95 * PATIENCE_S)
    num_before = have_begun(harness)
    for _ in range(12):
        harness.step()
    assert have_begun(harness) > num_before + 5
    harness.clock.sleep_until(harness.clock.now() + 2 * PATIENCE_S)
    begin_giant(harness, f"job:{GIANT}")


def test_one_whose_batch_is_cancelled_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    harness = harness_of_rows(tmp_path, 30, max_tokens=9)
    harness.step()
    harness.core.handle(CancelBatch("job"))
    harness.core.handle(batch(tmp_path, "next", rows(200, GIANT, first_token=300), max_tokens=9))
    for _ in range(12):
        harness.step()
    harness.clock.sleep_until(harness.clock.now() + PATIENCE_S)
    begin_giant(harness, f"next:{GIANT}")


def test_a_row_that_is_only_a_little_too_large_is_waited_for(tmp_path: Path) -> None:
    harness = Harness(num_blocks=80, offline_max_kv_ratio=0.9)
    harness.core.handle(online("chat", [7] * 300, max_tokens=8, tpot_slo_s=10.0))
    for _ in range(3):
        harness.step()
    harness.core.handle(batch(tmp_path, "job", [[10] * 17, [11] * 2], max_tokens=1))
    assert set(harness.step()) == {"chat"}

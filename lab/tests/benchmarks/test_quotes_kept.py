"""Accepted quotes: what counts as kept."""

import pytest

from benchmarks.live.plan import Targets
from lab.benchmarks.quotes_kept import PromisedEnd, summary
from neaptide.loadgen.client.recorder import ChatRecord

TARGETS = Targets(1.0, 0.1)


def end(completed_at: int | None, due_at: int = 120) -> PromisedEnd:
    return PromisedEnd(10, 100.0, 15.0, due_at, completed_at)


def chat(ttft_s: float) -> ChatRecord:
    return ChatRecord(0.0, token_times_s=[ttft_s, ttft_s + 0.05], num_output_tokens=2)


def test_a_batch_is_kept_if_it_is_completed_by_its_promise() -> None:
    assert [end(at_s).is_kept for at_s in (110, 120, 121, None)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("num_late", "late_chats", "holds"), [(1, 0, True), (2, 0, False), (1, 1, True), (1, 2, False)]
)
def test_it_holds_if_nine_of_ten_are_kept_and_chats_lose_a_point_at_most(
    num_late: int, late_chats: int, holds: bool
) -> None:
    ends = [end(121)] * num_late + [end(110)] * (10 - num_late)
    beside = [chat(2.0)] * late_chats + [chat(0.5)] * (100 - late_chats)
    result = summary(ends, [chat(0.5)] * 100, beside, TARGETS)
    assert result["kept"] == pytest.approx(1 - num_late / 10)
    assert result["ended_by_p50"] == pytest.approx(1 - num_late / 10)
    assert result["attainment"]["beside"] == pytest.approx(1 - late_chats / 100)
    assert result["holds"] is holds

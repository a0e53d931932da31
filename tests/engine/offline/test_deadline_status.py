"""Whether batches will end in time: what is flagged, when, and when no more."""

import zlib
from pathlib import Path

import msgspec
import pytest

from neaptide.engine.config import CacheConfig
from neaptide.engine.messages import AddBatch, BatchDeadlineStatus, CancelBatch, DeadlineStatus, SetOffline
from neaptide.engine.offline import deadline_status
from neaptide.engine.offline.deadline_status import PERIOD_S, DeadlineJudge
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.work import WholeDevice
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.server.batches.planning.request import unpacked
from tests.engine.harness import Harness, batch, online

STEP_TOKENS = 100


def job(directory: Path, name: str, rows: int, deadline_s: float) -> AddBatch:
    """So many rows that fill a step each, without a decode: a second for a hundred."""
    first = zlib.crc32(name.encode()) % 1000
    message = batch(directory, name, [[first + row] * STEP_TOKENS for row in range(rows)], max_tokens=1)
    return msgspec.structs.replace(message, deadline_s=deadline_s)


class Judged:
    """Outlooks of jobs in a pool that nothing is taken from. A step takes 10 ms."""

    def __init__(self, *messages: AddBatch) -> None:
        self.pool = OfflinePool()
        self.outlooks = DeadlineJudge(WholeDevice(ConstantCostModel(0.01), STEP_TOKENS, 256, 1_000_000))
        self._table = Harness().core.scheduler.queues.table
        for message in messages:
            self.pool.add_batch(message, 0.0, 4096)

    def report(self, now_s: float = 0.0, rate: float | None = None) -> list[BatchDeadlineStatus] | None:
        return self.outlooks.report(self.pool.jobs, self._table, rate, now_s)

    def found(self, now_s: float = 0.0, rate: float | None = None) -> dict[str, DeadlineStatus]:
        self.outlooks.hurry()
        report = self.report(now_s, rate)
        assert report is not None
        return {one.batch_id: one.outlook for one in report}


@pytest.mark.parametrize(("deadline_s", "outlook"), [(1.99, DeadlineStatus.INFEASIBLE), (2.0, DeadlineStatus.ON_TIME)])
def test_a_window_shorter_than_the_whole_device_needs_is_infeasible(
    deadline_s: float, outlook: DeadlineStatus, tmp_path: Path
) -> None:
    (one,) = Judged(job(tmp_path, "a", 200, deadline_s)).report() or []
    assert one == BatchDeadlineStatus("a", outlook, pytest.approx(2.0), None, deadline_s)


@pytest.mark.parametrize(("rate", "outlook"), [(4999.0, DeadlineStatus.AT_RISK), (5050.0, DeadlineStatus.ON_TIME)])
def test_a_window_too_short_for_the_rate_of_late_is_a_risk(
    rate: float, outlook: DeadlineStatus, tmp_path: Path
) -> None:
    """200 prompts of 100 tokens and an answer of one."""
    (one,) = Judged(job(tmp_path, "a", 200, 4.0)).report(rate=rate) or []
    assert (one.outlook, one.expected_s) == (outlook, pytest.approx(20_200 / rate))


def test_what_is_due_earlier_comes_before(tmp_path: Path) -> None:
    judged = Judged(job(tmp_path, "late", 200, 4.0), job(tmp_path, "early", 210, 3.0))
    assert judged.found() == {"early": DeadlineStatus.ON_TIME, "late": DeadlineStatus.INFEASIBLE}
    assert judged.found(rate=10_200.0) == {"early": DeadlineStatus.ON_TIME, "late": DeadlineStatus.INFEASIBLE}


def test_what_cannot_be_in_time_stands_in_nobodys_way(tmp_path: Path) -> None:
    judged = Judged(job(tmp_path, "late", 200, 4.0), job(tmp_path, "lost", 310, 3.0))
    assert judged.found(rate=8_000.0) == {"lost": DeadlineStatus.INFEASIBLE, "late": DeadlineStatus.ON_TIME}


def test_a_batch_at_risk_does_not_count_for_the_rate_but_for_the_device(tmp_path: Path) -> None:
    judged = Judged(job(tmp_path, "late", 150, 4.0), job(tmp_path, "risky", 250, 3.0))
    assert judged.found(rate=8_000.0) == {"risky": DeadlineStatus.AT_RISK, "late": DeadlineStatus.ON_TIME}
    assert judged.found(now_s=0.1, rate=8_000.0) == {"risky": DeadlineStatus.AT_RISK, "late": DeadlineStatus.INFEASIBLE}


def test_an_outlook_brightens_only_with_room(tmp_path: Path) -> None:
    judged = Judged(job(tmp_path, "a", 200, 4.0))
    rates = (5_000.0, 5_100.0, 5_600.0, 5_700.0, 5_100.0)
    found = [judged.found(rate=rate)["a"] for rate in rates]
    assert found == [DeadlineStatus.AT_RISK] * 3 + [DeadlineStatus.ON_TIME] * 2


def test_an_infeasible_batch_is_given_another_chance_when_it_needs_much_less(tmp_path: Path) -> None:
    judged = Judged(job(tmp_path, "a", 200, 1.9))
    assert judged.found()["a"] is DeadlineStatus.INFEASIBLE
    for _ in range(20):
        judged.pool.ended(judged.pool.pop())
    assert judged.found()["a"] is DeadlineStatus.INFEASIBLE, "180 steps in 1.9 s, more than nine tenths"
    for _ in range(10):
        judged.pool.ended(judged.pool.pop())
    assert judged.found()["a"] is DeadlineStatus.ON_TIME


def test_reports_come_once_in_a_period_and_at_once_when_a_batch_comes_or_goes(tmp_path: Path) -> None:
    judged = Judged(job(tmp_path, "a", 2, 100.0))
    reported = [judged.report(now_s) is not None for now_s in (0.0, PERIOD_S / 2, PERIOD_S, 1.5 * PERIOD_S)]
    assert reported == [True, False, True, False]
    judged.outlooks.hurry()
    assert judged.report(1.6 * PERIOD_S) is not None


def test_that_no_batch_is_left_is_said_once(tmp_path: Path) -> None:
    judged = Judged(job(tmp_path, "a", 2, 100.0))
    judged.report(0.0)
    judged.pool.cancel_batch("a")
    assert [judged.report(second) for second in (1.0, 2.0, 3.0)] == [[], None, None]


# ---- in the engine ----


def engine(policy: str = "neaptide", step_s: float = 0.1) -> Harness:
    """A step takes one row of a hundred tokens."""
    cost_model, cache = ConstantCostModel(step_s), CacheConfig(block_size=STEP_TOKENS)
    return Harness(400, cost_model, cache, max_num_batched_tokens=STEP_TOKENS, policy=policy, tpot_slo_s=1.0)


def run_until(harness: Harness, end_s: float) -> None:
    while harness.clock.now() < end_s:
        harness.core.step()


def only_report(harness: Harness) -> BatchDeadlineStatus:
    (one,) = harness.core.report_outlooks() or []
    return one


def test_an_impossible_job_is_flagged_when_it_is_submitted(tmp_path: Path) -> None:
    harness = engine(step_s=0.01)
    harness.core.handle(job(tmp_path, "impossible", 200, 1.5))
    assert harness.core.report_outlooks() == [
        BatchDeadlineStatus("impossible", DeadlineStatus.INFEASIBLE, pytest.approx(2.0), None, 1.5)
    ]
    harness.core.handle(job(tmp_path, "normal", 200, 100.0))
    assert [one.outlook for one in harness.core.report_outlooks() or []] == [
        DeadlineStatus.INFEASIBLE,
        DeadlineStatus.ON_TIME,
    ]
    harness.core.handle(CancelBatch("impossible"))
    assert [one.batch_id for one in harness.core.report_outlooks() or []] == ["normal"]


@pytest.mark.parametrize(("policy", "is_known"), [("neaptide", True), ("priority", False)])
def test_the_rate_of_late_is_that_of_shares(policy: str, is_known: bool, tmp_path: Path) -> None:
    harness = engine(policy)
    harness.core.handle(job(tmp_path, "a", 50, 100.0))
    run_until(harness, 1.55)
    one = only_report(harness)
    assert one.needed_s == pytest.approx(3.4)
    assert one.expected_s == (pytest.approx(3.4, rel=0.05) if is_known else None)


def test_a_pause_does_not_count_as_slow_work_and_the_time_goes_on(tmp_path: Path) -> None:
    harness = engine()
    harness.core.handle(job(tmp_path, "a", 50, 20.0))
    run_until(harness, 1.55)
    before = only_report(harness)
    harness.core.handle(SetOffline(True))
    harness.core.handle(online("chat", [1] * 10, max_tokens=150, arrival_s=1.6))
    run_until(harness, 15.05)
    after = only_report(harness)
    assert (before.outlook, after.outlook) == (DeadlineStatus.ON_TIME, DeadlineStatus.ON_TIME)
    assert after.expected_s == pytest.approx(before.expected_s)
    harness.clock.sleep_until(17.0)
    last = only_report(harness)
    assert (last.outlook, last.left_s) == (DeadlineStatus.INFEASIBLE, pytest.approx(3.0))


def test_it_says_how_far_the_answers_are_that_run(tmp_path: Path) -> None:
    """Of rows that have put out something, for whoever plans the pool."""
    harness = engine(step_s=0.01)
    harness.core.handle(batch(tmp_path, "a", [[1] * 10, [2] * 10, [3] * 10], max_tokens=30))
    assert only_report(harness).running_rows == b""
    for _ in range(4):
        harness.core.step()
    harness.clock.sleep_until(harness.clock.now() + PERIOD_S)
    one = only_report(harness)
    assert unpacked(one.running_rows).tolist() == [0, 1, 2]
    assert unpacked(one.running_tokens).tolist() == [4, 4, 4]


def test_many_batches_are_judged_some_at_a_time_and_reported_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Judged(*(job(tmp_path, f"b{k}", 2, 100.0 + k) for k in range(5)))
    whole = judged.report()
    monkeypatch.setattr(deadline_status, "JOBS_AT_ONCE", 2)
    judged.outlooks.hurry()
    assert [judged.report(0.0), judged.report(0.1), judged.report(0.2)] == [None, None, whole]
    judged.outlooks.hurry()
    judged.report(0.3)
    judged.pool.cancel_batch("b1")
    judged.outlooks.hurry()
    judged.report(0.4)
    report = judged.report(0.5)
    assert report is not None
    assert [one.batch_id for one in report] == ["b0", "b2", "b3", "b4"]
    assert [judged.report(0.6), judged.report(0.7) is not None, judged.report(0.8)] == [None, True, None]

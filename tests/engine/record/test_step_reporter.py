"""Reports of an engine on its steps."""

from pathlib import Path

import numpy as np
import pytest

from neaptide.engine.interfaces import Prediction
from neaptide.engine.messages import RecentSteps, SetOffline
from neaptide.engine.record.step_reporter import StepReporter
from neaptide.engine.steps.plan import BatchShape
from tests.engine.harness import Harness, batch, online

MS = 1e-3


class TokenCosts:
    """A step takes a millisecond for each of its tokens."""

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(shape.num_tokens * MS, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learns nothing."""


def reporting(**scheduler: object) -> tuple[Harness, StepReporter]:
    harness = Harness(cost_model=TokenCosts(), **scheduler)  # type: ignore[arg-type]
    reporter = StepReporter(harness.core.scheduler)
    harness.core.subscribe(reporter)
    return harness, reporter


def taken(reporter: StepReporter) -> RecentSteps:
    report = reporter.take(9.0)
    assert report is not None
    return report


def streams(report: RecentSteps) -> list[list[int]]:
    return [np.frombuffer(step.streams, np.int32).tolist() for step in report.steps]


def test_a_chat_is_a_chunk_and_then_a_stream() -> None:
    harness, reporter = reporting()
    harness.core.handle(online("a", [7] * 10, max_tokens=3))
    harness.run()
    report = taken(reporter)
    assert report.taken == [("a", 0.0, 10)]
    assert [step.admitted for step in report.steps] == [[(1, "a")], [], []]
    assert [step.chunks for step in report.steps] == [[(1, 10, 0)], [], []]
    assert streams(report) == [[], [1], [1]]
    assert [step.online_s for step in report.steps] == [step.predicted_s for step in report.steps]
    first = report.steps[0]
    assert (first.start_s, first.end_s - first.start_s) == pytest.approx((0.0, first.busy_s))
    assert report.online_s == pytest.approx(sum(step.busy_s for step in report.steps))
    assert report.offline_s == {}
    assert reporter.take(9.0) is None


def test_batch_work_has_its_share_of_a_step_and_of_the_device(tmp_path: Path) -> None:
    harness, reporter = reporting()
    harness.core.handle(online("a", [7] * 10, max_tokens=2, tpot_slo_s=9.0, ttft_slo_s=9.0))
    harness.core.handle(batch(tmp_path, "b", [[8] * 30], max_tokens=2))
    harness.run()
    report = taken(reporter)
    first = report.steps[0]
    assert (first.offline_prefill_tokens, first.offline_decode_tokens) == (30, 0)
    assert (first.predicted_s, first.online_s, first.streams_s) == pytest.approx((40 * MS, 10 * MS, 0.0))
    second = report.steps[1]
    assert (second.offline_decode_tokens, second.online_s, second.streams_s) == pytest.approx((1, 1 * MS, 1 * MS))
    device_s = sum(step.busy_s for step in report.steps)
    assert report.online_s + report.offline_s[""] == pytest.approx(device_s)
    assert report.online_s == pytest.approx(first.busy_s / 4 + second.busy_s / 2)


def test_who_waits_and_what_is_left_for_them() -> None:
    harness, reporter = reporting(max_num_seqs=1)
    for name in "ab":
        harness.core.handle(online(name, [7] * 10, max_tokens=2, ttft_slo_s=9.0))
    harness.run()
    steps = taken(reporter).steps
    assert [(step.waiting_online, step.free_slots) for step in steps] == [(1, 0), (1, 0), (0, 0), (0, 0)]
    assert [step.online_blocks > 0 for step in steps] == [True, False, True, False]
    assert all(step.available_blocks < 64 for step in steps)


def test_a_paused_engine_says_so() -> None:
    harness, reporter = reporting()
    harness.core.handle(SetOffline(True))
    harness.core.handle(online("a", [7], max_tokens=1))
    harness.run()
    assert taken(reporter).is_paused
    without_a_step = reporter.take(9.5)
    assert without_a_step is not None
    assert (without_a_step.steps, without_a_step.span_s) == ([], 0.5)


def test_a_fault_ends_the_record_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, reporter = reporting()
    monkeypatch.setattr(reporter, "_planned", None)
    harness.core.handle(online("a", [7] * 10, max_tokens=3))
    harness.run()
    assert len(harness.tokens["a"]) == 3
    assert reporter.failed
    assert reporter.take(9.0) is None

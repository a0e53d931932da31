"""Schedules, step by step, on a virtual clock: which request computes how many tokens."""

from pathlib import Path

import pytest

from neaptide.engine.interfaces import Prediction
from neaptide.engine.messages import AbortRequest, CancelBatch, SetOffline
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.engine.scheduler.judgement import Judgement
from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from tests.engine.harness import Harness, batch, flex, online
from tests.engine.offline.planning.orders import plan, two_ends


class PerTokenCost:
    """Ten milliseconds per token, no margin: budgets become token counts."""

    def predict(self, shape: BatchShape) -> Prediction:
        return Prediction(0.01 * shape.num_tokens, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        pass


def test_prompt_then_one_token_a_step() -> None:
    harness = Harness()
    harness.core.handle(online("a", [7] * 6, max_tokens=3))
    assert harness.run() == [{"a": 6}, {"a": 1}, {"a": 1}]
    assert harness.reason("a") is FinishReason.LENGTH
    assert len(harness.tokens["a"]) == 3


def test_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.core.handle(online("a", [7] * 20, max_tokens=1))
    assert harness.run() == [{"a": 8}, {"a": 8}, {"a": 4}]


def test_online_goes_first_and_offline_fills() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.core.handle(flex("f", [8] * 6, max_tokens=2))
    harness.core.handle(online("a", [7] * 5, max_tokens=3))
    assert harness.run()[:3] == [{"a": 5, "f": 3}, {"a": 1, "f": 3}, {"a": 1, "f": 1}]


def test_earlier_deadline_first_and_priority_first_at_equal_deadline() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.core.handle(online("late", [7] * 4, max_tokens=1, ttft_slo_s=2.0))
    harness.core.handle(online("default", [7] * 4, max_tokens=1))
    harness.core.handle(online("priority", [8] * 4, max_tokens=1, tier=Tier.PRIORITY))
    assert harness.run() == [{"priority": 4}, {"default": 4}, {"late": 4}]


def test_a_request_that_can_no_longer_make_its_deadline_goes_after_those_that_can() -> None:
    harness = Harness(cost_model=ConstantCostModel(0.1), max_num_batched_tokens=4)
    harness.core.handle(online("hopeless", [7] * 4, max_tokens=1, ttft_slo_s=0.05))
    harness.core.handle(online("feasible", [8] * 4, max_tokens=1, ttft_slo_s=1.0))
    assert harness.run() == [{"feasible": 4}, {"hopeless": 4}]


def test_offline_prefill_is_cut_to_the_slack_of_running_streams() -> None:
    harness = Harness(cost_model=PerTokenCost(), delivery_latency_s=0.0, ttft_slo_s=5.0)
    harness.core.handle(online("a", [7], max_tokens=10, tpot_slo_s=0.4, ttft_slo_s=5.0))
    harness.step()  # the first token is out at t = 0.01, the second is due at 0.41
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert 10 <= sum(harness.step().values()) <= 40


def test_offline_work_makes_no_gap_over_the_target_of_a_stream_that_banked_slack() -> None:
    harness = Harness(cost_model=PerTokenCost(), delivery_latency_s=0.0, ttft_slo_s=5.0)
    harness.core.handle(online("a", [7], max_tokens=50, tpot_slo_s=0.2, ttft_slo_s=2.0))
    for _ in range(10):
        harness.step()
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert 10 <= sum(harness.step().values()) <= 20


def test_offline_step_without_online_work_leaves_room_for_the_next_arrival() -> None:
    harness = Harness(cost_model=PerTokenCost(), delivery_latency_s=0.0, ttft_slo_s=0.5, tpot_slo_s=0.1)
    harness.core.handle(flex("f", [8] * 100, max_tokens=1))
    assert harness.step() == {"f": 25}


def test_offline_work_goes_on_when_no_step_is_short_enough() -> None:
    harness = Harness(cost_model=ConstantCostModel(10.0), ttft_slo_s=0.5, tpot_slo_s=0.1)
    for name, token in (("f", 8), ("g", 9)):
        harness.core.handle(flex(name, [token] * 10, max_tokens=2))
    assert all(harness.run())
    assert (harness.reason("f"), harness.reason("g")) == (FinishReason.LENGTH, FinishReason.LENGTH)


def test_resident_offline_sits_out_and_keeps_its_blocks() -> None:
    harness = Harness(cost_model=PerTokenCost(), delivery_latency_s=0.0, ttft_slo_s=5.0)
    harness.core.handle(flex("f", [8] * 6, max_tokens=9))
    harness.step()
    blocks = list(harness.core.scheduler.queues.running_offline["f"].block_ids)
    harness.core.handle(online("a", [7] * 4, max_tokens=20, tpot_slo_s=0.015, ttft_slo_s=9.0))
    harness.step()
    assert harness.step() == {"a": 1}  # 10 ms a token, and the stream's next is due in 15 ms: no other fits
    assert harness.core.scheduler.queues.running_offline["f"].block_ids == blocks
    assert harness.core.scheduler.queues.running_offline["f"].num_preemptions == 0


def test_longest_sat_out_comes_back_first() -> None:
    harness = Harness(max_num_batched_tokens=3)
    for name in ("f", "g", "h"):
        harness.core.handle(flex(name, [8], max_tokens=20))
    harness.step()
    harness.core.handle(online("a", [7], max_tokens=20))
    assert [sorted(harness.step()) for _ in range(4)] == [
        ["a", "f", "g"],
        ["a", "f", "h"],
        ["a", "f", "g"],
        ["a", "f", "h"],
    ]


def test_late_stream_catches_up_before_offline_work_goes_on() -> None:
    harness = Harness(cost_model=PerTokenCost(), delivery_latency_s=0.0, ttft_slo_s=5.0)
    harness.core.handle(online("a", [7], max_tokens=20, tpot_slo_s=0.03, ttft_slo_s=9.0))
    harness.core.handle(flex("f", [8], max_tokens=20))
    harness.step()
    harness.clock.sleep_until(harness.clock.now() + 0.035)  # the next token was due 5 ms ago
    assert [sorted(harness.step()) for _ in range(4)] == [["a"], ["a"], ["a", "f"], ["a", "f"]]


def test_stream_that_cannot_catch_up_does_not_starve_offline_work() -> None:
    harness = Harness(cost_model=ConstantCostModel(0.16), delivery_latency_s=0.0, ttft_slo_s=5.0)
    harness.core.handle(online("a", [7], max_tokens=20, tpot_slo_s=0.04, ttft_slo_s=9.0))
    harness.core.handle(flex("f", [8], max_tokens=20))
    harness.step()
    harness.step()
    assert sorted(harness.step()) == ["a", "f"]


def test_stream_that_is_late_for_certain_does_not_starve_offline_work() -> None:
    harness = Harness(cost_model=PerTokenCost(), delivery_latency_s=0.0, ttft_slo_s=5.0)
    harness.core.handle(online("a", [7], max_tokens=20, tpot_slo_s=0.03, ttft_slo_s=9.0))
    harness.core.handle(flex("f", [8], max_tokens=20))
    harness.step()
    harness.clock.sleep_until(harness.clock.now() + 2.0)  # an answer of 32 tokens makes up for 31 * 20 ms at most
    assert [sorted(harness.step()) for _ in range(4)] == [["a", "f"]] * 4


def test_youngest_offline_request_is_preempted_for_online_and_finishes_later() -> None:
    harness = Harness(num_blocks=8)
    for name in ("f", "g"):
        harness.core.handle(flex(name, [8 + (name == "g")] * 12, max_tokens=3))
    harness.step()
    harness.core.handle(online("a", [7] * 12, max_tokens=2))
    harness.step()
    assert set(harness.core.scheduler.queues.running_offline) == {"f"}
    harness.run()
    assert harness.ends["g"][0].num_preemptions == 1
    assert harness.ends["f"][0].num_preemptions == 0
    alone = Harness()
    alone.core.handle(flex("g", [9] * 12, max_tokens=3))
    alone.run()
    assert harness.tokens["g"] == alone.tokens["g"]


def test_nobody_is_preempted_for_a_request_that_still_would_not_fit() -> None:
    harness = Harness(num_blocks=8)
    harness.core.handle(online("a", [7] * 16, max_tokens=9))
    harness.core.handle(flex("f", [8] * 8, max_tokens=9))
    harness.step()
    harness.core.handle(online("b", [9] * 20, max_tokens=1))
    harness.step()
    assert set(harness.core.scheduler.queues.running_offline) == {"f"}
    harness.run()
    assert harness.reason("b") is FinishReason.LENGTH


def test_offline_leaves_the_headroom_free() -> None:
    harness = Harness(num_blocks=10, headroom_ratio=0.4)
    for i in range(3):
        harness.core.handle(flex(f"f{i}", [8 + i] * 11, max_tokens=2))
    harness.step()
    assert harness.core.kv.occupancy().offline == 6
    assert len(harness.core.scheduler.queues.running_offline) == 2


@pytest.mark.parametrize(("headroom_ratio", "num_started"), [(0.0, 5), (0.5, 2)])
def test_long_answers_of_a_plan_start_at_once_where_they_will_fit(
    headroom_ratio: float, num_started: int, tmp_path: Path
) -> None:
    """Each will hold 44 tokens, of the 400 less the headroom and less the prompts of two steps: 2 x 67 tokens,
    or 2 x 34 of the half."""
    harness = Harness(num_blocks=100, headroom_ratio=headroom_ratio)
    harness.core.handle(batch(tmp_path, "dense", [[k] * 40 for k in range(1, 5)], max_tokens=1))
    harness.core.handle(batch(tmp_path, "long", [[k] * 4 for k in range(11, 31)], max_tokens=40))
    rows = [("dense", k) for k in range(4)] + [("long", k) for k in range(20)]
    densities = [1000.0] * 4 + [2.0] * 20
    ends = two_ends([40] * 4 + [24] * 20, densities, 3.0, lasting_steps=[1] * 4 + [40] * 20)
    harness.core.handle(plan(*rows, ends=ends))
    tokens = harness.step()
    assert sum(name.startswith("long") for name in tokens) == num_started


def test_resident_offline_work_grows_into_the_headroom_while_blocks_are_free() -> None:
    harness = Harness(num_blocks=10, headroom_ratio=0.4)
    for i in range(2):
        harness.core.handle(flex(f"f{i}", [8 + i] * 11, max_tokens=5))
    harness.step()
    assert harness.run() == [{"f0": 1, "f1": 1}] * 4
    assert harness.ends["f0"][0].num_preemptions == harness.ends["f1"][0].num_preemptions == 0


def test_a_begun_offline_prompt_goes_on_into_the_headroom_as_well() -> None:
    harness = Harness(num_blocks=10, headroom_ratio=0.4, max_num_batched_tokens=20)
    harness.core.handle(flex("f0", [8] * 4, max_tokens=2))
    harness.core.handle(flex("f1", [9] * 20, max_tokens=1))
    assert harness.run() == [{"f0": 4, "f1": 16}, {"f0": 1, "f1": 4}]


def test_batch_rows_run_in_file_order_and_flex_goes_before_them(tmp_path: Path) -> None:
    harness = Harness(max_num_seqs=1)
    harness.core.handle(batch(tmp_path, "job", [[7], [8], [9]], max_tokens=1))
    harness.core.handle(flex("f", [6], max_tokens=1))
    assert harness.run() == [{"f": 1}, {"job:0": 1}, {"job:1": 1}, {"job:2": 1}]
    assert [event for event in harness.log if event[0] == "start"] == [
        ("start", name) for name in ("f", "job:0", "job:1", "job:2")
    ]


def test_batch_rows_that_cannot_run_end_with_an_error_and_the_others_run(tmp_path: Path) -> None:
    harness = Harness(num_blocks=4)
    harness.core.handle(batch(tmp_path, "job", [[7] * 3, [], [8] * 16, [9] * 3], max_tokens=1))
    harness.run()
    reasons = [harness.reason(f"job:{row}") for row in range(4)]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]


def test_a_missing_token_file_holds_up_its_rows_only(tmp_path: Path) -> None:
    harness = Harness()
    message = batch(tmp_path, "job", [[7], [8]])
    (tmp_path / "job.tokens").unlink()
    harness.core.handle(message)
    harness.core.handle(online("a", [7], max_tokens=1))
    harness.run()
    assert list(harness.ends) == ["a"]
    assert harness.reason("a") is FinishReason.LENGTH


def test_cancelled_batch_ends_the_rows_that_started_and_forgets_the_others(tmp_path: Path) -> None:
    harness = Harness(max_num_seqs=2)
    harness.core.handle(batch(tmp_path, "job", [[7], [8], [9], [10]], max_tokens=9))
    harness.step()
    harness.core.handle(CancelBatch("job"))
    harness.run()
    assert {name: harness.reason(name) for name in harness.ends} == {
        "job:0": FinishReason.ABORT,
        "job:1": FinishReason.ABORT,
    }
    assert harness.core.kv.available == harness.core.kv.num_blocks


def test_cancelled_row_that_was_preempted_is_forgotten_by_the_executor(tmp_path: Path) -> None:
    harness = Harness(num_blocks=8)
    harness.core.handle(batch(tmp_path, "job", [[8] * 12, [9] * 12], max_tokens=3))
    harness.step()
    harness.core.handle(online("a", [7] * 12, max_tokens=2))
    harness.step()
    harness.core.handle(CancelBatch("job"))
    harness.run()
    harness.core.handle(online("b", [7], max_tokens=1))
    harness.run()
    assert harness.executor.known_requests == {"b"}
    assert harness.reason("job:1") is FinishReason.ABORT


def test_offline_requests_that_share_a_prefix_make_room_together() -> None:
    harness = Harness(num_blocks=40)
    prefix = [8] * 100
    for i in range(30):
        harness.core.handle(flex(f"f{i}", [*prefix, 10 + i], max_tokens=50))
    harness.step()
    harness.step()
    harness.core.handle(online("a", [7] * 100, max_tokens=1))
    assert "a" in harness.step()


def test_no_seat_is_taken_for_a_request_that_lacks_blocks() -> None:
    harness = Harness(num_blocks=12, max_num_seqs=2)
    harness.core.handle(online("a", [7] * 30, max_tokens=10))
    harness.core.handle(flex("f", [8] * 4, max_tokens=9))
    harness.step()
    harness.core.handle(online("b", [9] * 30, max_tokens=1))
    for _ in range(5):
        harness.step()
    assert harness.core.scheduler.queues.running_offline["f"].num_preemptions == 0


def test_late_requests_come_behind_those_that_can_be_in_time() -> None:
    harness = Harness(num_blocks=128, max_num_batched_tokens=40)
    harness.core.handle(online("late", [7] * 100, max_tokens=1, ttft_slo_s=0.001))
    harness.core.handle(online("b", [8] * 70, max_tokens=1, ttft_slo_s=9.0))
    assert harness.step() == {"b": 40}


def test_late_priority_goes_before_late_default() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.core.handle(online("d", [8] * 4, max_tokens=1, ttft_slo_s=0.001))
    harness.core.handle(online("p", [7] * 4, max_tokens=1, ttft_slo_s=0.001, tier=Tier.PRIORITY))
    assert harness.run() == [{"p": 4}, {"d": 4}]


def test_an_idle_step_is_no_longer_than_what_requests_with_the_smallest_recent_ttft_target_can_wait() -> None:
    harness = Harness(cost_model=PerTokenCost(), delivery_latency_s=0.0, ttft_slo_s=1.0, tpot_slo_s=0.1)
    for i, ttft_slo_s in enumerate((0.5, 1.0)):
        harness.core.handle(online(f"a{i}", [7], max_tokens=1, ttft_slo_s=ttft_slo_s))
    harness.run()
    harness.core.handle(flex("f", [8] * 200, max_tokens=1))
    assert 25 <= harness.step()["f"] <= 49


def test_paused_offline_work_stays_where_it_is() -> None:
    harness = Harness()
    harness.core.handle(flex("f", [8] * 5, max_tokens=9))
    harness.step()
    harness.core.handle(SetOffline(True))
    harness.core.handle(online("a", [7], max_tokens=2))
    assert harness.run() == [{"a": 1}, {"a": 1}]
    harness.core.handle(SetOffline(False))
    harness.run()
    assert harness.reason("f") is FinishReason.LENGTH


@pytest.mark.parametrize("tier", [Tier.DEFAULT, Tier.FLEX])
def test_abort_ends_waiting_and_running_requests_once(tier: Tier) -> None:
    harness = Harness(max_num_seqs=1)
    for name in ("a", "b"):
        harness.core.handle(online(name, [7] * 5, max_tokens=9, tier=tier))
    harness.step()
    harness.core.handle(AbortRequest(["a", "b", "unknown"], FinishReason.STOP))
    harness.core.handle(AbortRequest(["a"]))
    harness.run()
    assert harness.reason("a") is FinishReason.STOP
    assert harness.reason("b") is FinishReason.STOP


def test_zero_output_tokens_ends_with_the_prompt() -> None:
    harness = Harness()
    harness.core.handle(online("a", [7] * 5, max_tokens=0))
    assert harness.run() == [{"a": 5}]
    assert harness.reason("a") is FinishReason.LENGTH


def test_stop_token_ends_the_output_without_being_part_of_it() -> None:
    harness = Harness()
    harness.core.handle(online("probe", [7] * 5, max_tokens=5))
    harness.run()
    stop = harness.tokens["probe"][2]
    harness.core.handle(online("a", [7] * 5, params=SamplingParams(max_tokens=5, stop_token_ids=(stop,))))
    harness.run()
    assert harness.tokens["a"] == harness.tokens["probe"][:2]
    assert harness.ends["a"][0].stop_token_id == stop


def test_min_tokens_keeps_a_stop_token_from_ending_the_output() -> None:
    harness = Harness()
    harness.core.handle(online("probe", [7] * 5, max_tokens=5))
    harness.run()
    stop = harness.tokens["probe"][0]
    params = SamplingParams(max_tokens=5, stop_token_ids=(stop,), min_tokens=3)
    harness.core.handle(online("a", [7] * 5, params=params))
    harness.run()
    assert len(harness.tokens["a"]) >= 3


def test_too_long_request_is_refused_with_its_one_terminal_output() -> None:
    harness = Harness(num_blocks=4)
    harness.core.handle(online("a", [7] * 16, max_tokens=1))
    harness.run()
    assert harness.reason("a") is FinishReason.ERROR


def test_rows_report_once_unless_their_tokens_are_wanted_at_every_step(tmp_path: Path) -> None:
    harness = Harness()
    message = batch(tmp_path, "job", [[7], [8]], max_tokens=3)
    message.stream_rows = [1]
    harness.core.handle(message)
    outputs = []
    while harness.core.has_work:
        outputs += harness.core.step().outputs
    assert [len(o.new_token_ids) for o in outputs if o.request_id == "job:0"] == [3]
    assert [len(o.new_token_ids) for o in outputs if o.request_id == "job:1"] == [1, 1, 1]


def test_an_error_over_waiting_prompts_is_not_blamed_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    harness.core.handle(online("stream", [7] * 4))
    harness.step()
    harness.core.handle(online("waiting", [8] * 4))

    def fail(*args: object) -> bool:
        raise RuntimeError("a bug in the judgement")

    monkeypatch.setattr(Judgement, "choose", fail)
    with pytest.raises(RuntimeError, match="a bug in the judgement"):
        harness.step()
    assert harness.ends == {}


def test_the_first_token_of_one_leaves_that_of_another_where_it_was() -> None:
    harness = Harness()
    harness.core.handle(online("a", [8] * 3))
    harness.step()
    running = harness.core.scheduler.queues.running_online
    first_token_s = running["a"].first_token_s
    harness.core.handle(online("b", [9] * 3))
    assert harness.step() == {"a": 1, "b": 3}
    assert running["a"].first_token_s == first_token_s < running["b"].first_token_s

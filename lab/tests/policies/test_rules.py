"""Rules of every policy and every order: those of the laboratory keep them, too.

Most take a step in flight while the next is planned; the long form tries them without as well (``depth=0``).
"""

from pathlib import Path

import pytest

from lab.tests.again import again
from neaptide.engine.scheduler.policies import POLICIES, find_policy
from neaptide_lab.policies import ORDERS, RIVALS
from tests.engine import test_overlap as overlap
from tests.engine import test_overlap_faults as overlap_faults
from tests.engine.baselines import test_discriminating as discriminating
from tests.engine.baselines import test_publish_when_planned as publishing
from tests.engine.kv import test_host_tier as host_tier
from tests.engine.scheduler import test_blast_policies as blast
from tests.engine.scheduler import test_drafts as drafts
from tests.engine.scheduler import test_shared_prefixes as shared_prefixes
from tests.engine.steps import test_continued as continued
from tests.engine.steps import test_spoilt_prefix as spoilt_prefix
from tests.engine.test_blast import blast as play
from tests.simulation import test_planning_time as planning_time
from tests.simulation import test_replay as replays
from tests.simulation import test_replay_overlap as replay_overlap
from tests.simulation import test_simulator as simulator
from tests.simulation import test_simulator_overlap as simulator_overlap
from tests.simulation.planned import test_inline_planner as inline_planner
from tests.simulation.planned import test_wrong_lengths as wrong_lengths

SHARING = [name for name in RIVALS if find_policy(name).publishes_when_planned]
CACHED = [name for name in RIVALS if find_policy(name).uses_prefix_cache]
SORTING = [name for name in RIVALS if find_policy(name).row_key is not None]
RESERVING = ["lpm"]
"""Reserves so much at admission that a short run may see no preemption."""


def test_what_the_policies_are_like() -> None:
    assert set(SHARING) == {"balance", "batchllm", "blendserve", "bs+e", "bs+e+s", "dfs", "echo"}
    assert SORTING == ["dfs", "balance"]
    assert set(POLICIES) == {"neaptide", "fcfs", "priority"}


def test_priority_differs_from_priority_v0(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = ((name, tmp_path / place) for name, place in (("priority", "a"), ("priority-v0", "b")))
    assert discriminating.schedule(*first) != discriminating.schedule(*second)


@pytest.mark.parametrize("policy", RESERVING)
def test_every_request_ends_once_under_a_policy_that_reserves(policy: str, tmp_path: Path) -> None:
    play(0, 300, tmp_path, policy)


test_differs_from_fcfs = again(discriminating.test_schedule_is_not_that_of_fcfs, "policy", RIVALS)
test_is_the_same_each_time = again(discriminating.test_schedule_is_the_same_each_time, "policy", RIVALS)
test_ends_once = again(
    blast.test_every_accepted_request_ends_exactly_once, "policy", [name for name in RIVALS if name not in RESERVING]
)
test_ends_once_over_5000_steps = again(
    blast.test_every_accepted_request_ends_exactly_once_over_5000_steps, "policy", RIVALS
)

test_later_requests_read = again(
    publishing.test_later_requests_of_a_step_read_what_earlier_ones_compute, "policy", SHARING
)
test_others_read_earlier_steps = again(
    publishing.test_other_policies_share_what_earlier_steps_computed, "policy", ["lpm", "fcfs-v0"]
)
test_readers_compute_again = again(
    publishing.test_readers_of_a_request_that_raises_in_their_step_are_computed_again, "policy", SHARING
)
test_faults_spoil_no_other_text = again(
    publishing.test_faults_at_random_spoil_nobody_elses_text, "policy", [*SHARING, "lpm"]
)

test_a_draft_changes_nothing = again(
    drafts.test_making_a_draft_changes_nothing_and_the_same_state_gives_the_same_draft, "policy", RIVALS, depth=0
)
test_apply_does_what_was_said = again(drafts.test_apply_does_what_the_draft_said, "policy", RIVALS, depth=0)
test_exceptions_leave_others = again(
    drafts.test_an_exception_anywhere_in_planning_leaves_every_other_request_as_it_was, "policy", RIVALS, depth=0
)
test_only_the_failed_request_ends = again(drafts.test_only_the_request_that_planning_failed_at_ends, "policy", RIVALS)
test_an_exception_between_requests_passes = again(
    drafts.test_an_exception_between_requests_passes_and_nothing_has_changed, "policy", RIVALS
)
test_a_failed_row_ends_once = again(
    drafts.test_a_batch_row_that_planning_fails_at_ends_once_wherever_it_stands, "policy", RIVALS
)

test_answers_with_overlap = again(
    overlap.test_every_answer_is_that_of_an_engine_without_overlap, "policy", ["bros", "lpm"]
)
test_histories_with_overlap = again(overlap.test_random_histories_with_a_step_in_flight, "policy", RIVALS)
test_only_one_fails_with_overlap = again(
    overlap_faults.test_only_the_request_fails_that_a_step_raises_with, "policy", ["lpm"]
)
test_an_error_leaves_the_step_behind_it = again(
    overlap_faults.test_an_error_of_one_request_leaves_the_step_behind_it, "policy", SHARING
)
test_readers_of_a_failed_request = again(
    overlap_faults.test_readers_of_a_failed_request_compute_again, "policy", SHARING
)
test_readers_inside_an_undone_step = again(
    overlap_faults.test_readers_inside_a_step_that_was_undone_compute_again, "policy", SHARING
)
test_readers_of_an_aborted_request = again(
    overlap_faults.test_readers_of_a_request_that_was_aborted_in_a_step_that_fails_compute_again, "policy", SHARING
)
test_faults_with_overlap = again(overlap_faults.test_faults_at_random_spoil_no_other_text, "policy", ["bros", *SHARING])
test_what_is_computed_again_was_not_cached = again(
    overlap_faults.test_what_a_reader_has_to_compute_again_was_not_cached, "policy", SHARING
)
test_a_hit_that_was_taken_back = again(
    overlap_faults.test_a_hit_that_was_taken_back_does_not_count_as_cached, "policy", SHARING
)
test_readers_begin_again = again(spoilt_prefix.test_readers_begin_again_by_themselves, "policy", CACHED, depth=0)
test_rows_that_continue = again(
    continued.test_rows_that_continue_have_published_their_prompts, "policy", ["priority-v0", "lpm"], depth=0
)
test_host_memory = again(host_tier.test_random_histories_read_nothing_but_their_own_text, "policy", ["echo"], depth=0)
test_file_order = again(shared_prefixes.test_baselines_keep_file_order, "policy", ["bs+e"])

test_decides_in_a_replay_as_it_did = again(replays.test_every_policy_decides_in_a_replay_as_it_did, "policy", RIVALS)
test_jobs_in_several_messages_replay = again(
    replays.test_jobs_in_several_messages_replay_under_a_policy_that_sorts_rows, "policy", SORTING
)
test_a_job_that_comes_again_replays = again(
    replays.test_a_job_of_that_kind_that_is_cancelled_and_comes_again_replays, "policy", SORTING
)
test_faults_replay = again(replay_overlap.test_faults_replay, "policy", ["bros", *SHARING], depth=0)
test_planning_time_replays = again(planning_time.test_a_run_with_planning_time_replays, "policy", ["bros"])
test_every_token_counts_once = again(
    simulator.test_every_prompt_and_output_token_counts_exactly_once, "policy", ["priority-v0"]
)
test_comes_to_the_end = again(simulator_overlap.test_every_policy_comes_to_the_end_of_a_mixed_load, "policy", RIVALS)
test_completes_the_same_rows = again(simulator_overlap.test_the_same_offline_rows_are_completed, "policy", RIVALS)
test_has_the_same_throughput = again(
    simulator_overlap.test_throughput_is_the_same_where_planning_takes_no_time, "policy", RIVALS
)

test_asked_lengths_are_known = again(
    inline_planner.test_lengths_that_callers_ask_for_are_known_to_the_planner, "order,least", [("density", 30)]
)
test_a_run_with_plans_replays = again(inline_planner.test_a_run_with_plans_replays, "order", ORDERS)
test_wrong_lengths_cost_little = again(
    wrong_lengths.test_lengths_that_are_wrong_by_three_times_cost_little, "policy", ["blendserve"]
)

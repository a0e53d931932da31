"""Which running requests a draft of a step names and counts, and which it takes memory from."""

from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape
from tests.engine.harness import Harness, flex, online


def draft_of(harness: Harness) -> Draft:
    scheduler = harness.core.scheduler
    return Draft(scheduler.index, harness.clock.now(), scheduler.queues, StepBudget(harness.cost_model, 100))


def test_a_victim_that_frees_nothing_is_spared() -> None:
    harness = Harness(num_blocks=8)
    harness.core.handle(flex("old", [8] * 16))
    harness.core.handle(flex("young", [9] * 4))
    assert harness.step() == {"old": 16, "young": 4}
    # It reads the one block of ``young``, which comes first among the victims: letting go of it frees nothing.
    harness.core.handle(online("a", [9] * 4 + [7] * 16))
    harness.step()
    assert harness.watch.last is not None
    assert harness.watch.last.preempted.request_ids == ["old"]


def test_a_victim_without_whom_the_others_suffice_is_spared() -> None:
    harness = Harness(num_blocks=16)
    harness.core.handle(flex("old", [8] * 39, max_tokens=20))
    harness.core.handle(flex("young", [9] * 7, max_tokens=20))
    harness.step()
    # The two blocks of ``young``, which comes first among the victims, are not enough, and those of ``old`` are.
    harness.core.handle(online("a", [7] * 39, max_tokens=1))
    harness.step()
    assert harness.watch.last is not None
    assert harness.watch.last.preempted.request_ids == ["old"]


def test_offline_requests_in_the_step_are_no_victims() -> None:
    harness = Harness()
    for name in ("f", "g", "h"):
        harness.core.handle(flex(name, [8, 9]))
    harness.step()
    draft = draft_of(harness)
    draft.add(harness.core.scheduler.queues.running_offline["g"], 1)
    assert [request.request_id for request in draft.offline_victims()] == ["h", "f"]


def test_offline_decodes_taken_in_together_are_no_victims() -> None:
    harness = Harness()
    for name in ("f", "g", "h"):
        harness.core.handle(flex(name, [8, 9]))
    harness.step()
    draft = draft_of(harness)
    draft.add_decodes(draft.due_decodes(online=False)[:2], lambda request: False, 64)
    assert [request.request_id for request in draft.offline_victims()] == ["h"]


def test_online_victims_are_those_with_later_deadlines_that_are_not_in_the_step() -> None:
    harness = Harness()
    for name, ttft_slo_s in {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}.items():
        harness.core.handle(online(name, [8] * 3, tpot_slo_s=ttft_slo_s))
    harness.step()
    running = harness.core.scheduler.queues.running_online
    draft = draft_of(harness)
    draft.add(running["d"], 1)
    assert [request.request_id for request in draft.online_victims(running["a"])] == ["c", "b"]
    assert [request.request_id for request in draft.online_victims(running["c"])] == []


def test_a_victim_stands_first_among_those_that_the_draft_may_admit() -> None:
    harness = Harness(max_num_seqs=1)
    for name in ("f", "g"):
        harness.core.handle(flex(name, [8, 9]))
    harness.step()
    draft = draft_of(harness)
    draft.preempt(harness.core.scheduler.queues.running_offline["f"])
    assert [draft.pool.pop().request_id for _ in range(len(draft.pool))] == ["f", "g"]


def test_the_youngest_offline_request_sits_out_when_it_cannot_grow() -> None:
    harness = Harness(num_blocks=4)
    harness.core.handle(flex("old", [8] * 7))
    harness.core.handle(flex("young", [9] * 8))
    assert harness.step() == {"old": 7, "young": 8}
    assert harness.step() == {"old": 1}
    assert harness.core.scheduler.queues.running_offline["young"].num_preemptions == 0


def due_streams(draft: Draft) -> list[str]:
    return [request.request_id for request in draft.table.requests_of(draft.decoding_streams()[0])]


def test_streams_decode_earliest_deadline_first() -> None:
    harness = Harness()
    for name, tpot_slo_s in {"late": 3.0, "soon": 1.0, "later": 2.0}.items():
        harness.core.handle(online(name, [8] * 3, tpot_slo_s=tpot_slo_s))
    harness.core.handle(flex("f", [8, 9]))
    harness.step()
    assert due_streams(draft_of(harness)) == ["soon", "later", "late"]


def test_a_stream_that_takes_part_or_makes_way_decodes_no_more() -> None:
    harness = Harness()
    for name, tpot_slo_s in {"a": 3.0, "b": 1.0, "c": 2.0}.items():
        harness.core.handle(online(name, [8] * 3, tpot_slo_s=tpot_slo_s))
    harness.step()
    running, draft = harness.core.scheduler.queues.running_online, draft_of(harness)
    assert due_streams(draft) == ["b", "c", "a"]
    draft.add(running["c"], 1)
    assert due_streams(draft) == ["b", "a"]
    draft.preempt(running["a"])
    assert due_streams(draft) == ["b"]


def test_streams_that_were_taken_in_together_decode_no_more() -> None:
    harness = Harness()
    for name, tpot_slo_s in {"a": 3.0, "b": 1.0, "c": 2.0}.items():
        harness.core.handle(online(name, [8] * 3, tpot_slo_s=tpot_slo_s))
    harness.step()
    draft = draft_of(harness)
    rows, _ = draft.decoding_streams()
    draft.add_decodes(rows[:2], lambda request: False, 64)
    assert due_streams(draft) == ["a"]


def test_a_row_that_lacks_its_first_token_is_a_prompt_among_the_decodes() -> None:
    harness, shape = Harness(), BatchShape()
    for name in ("f", "g", "h"):
        harness.core.handle(flex(name, [8, 9]))
    harness.step()
    table, undone = harness.core.scheduler.queues.table, harness.core.scheduler.queues.running_offline["g"].slot
    table.computed[undone], table.total[undone] = 0, 1
    draft = draft_of(harness)
    draft.add_decodes(draft.due_decodes(online=False), lambda request: False, 64)
    for context_tokens in (2, 2, 0):
        shape.add(1, context_tokens)
    assert (draft.budget.shape, draft.num_parts) == (shape, 3)


def test_the_draft_counts_what_runs_with_its_actions_done() -> None:
    harness = Harness(max_num_seqs=2)
    harness.core.handle(online("a", [8] * 3))
    harness.core.handle(flex("f", [8, 9]))
    harness.step()
    harness.core.handle(flex("g", [8, 9]))
    queues, draft = harness.core.scheduler.queues, draft_of(harness)
    assert (draft.num_running, draft.num_running_offline) == (2, 1)
    draft.preempt(queues.running_offline["f"])
    assert (draft.num_running, draft.num_running_offline) == (1, 0)
    request = draft.pool.peek()
    assert request is not None
    draft.admit(request, draft.kv.match_prefix(request), 1)
    assert (draft.num_running, draft.num_running_offline) == (2, 1)
    draft.preempt(queues.running_online["a"])
    assert (draft.num_running, draft.num_running_offline) == (1, 1)

"""Rows of the request table as a draft of a step names them."""

from neaptide.engine.scheduler.draft import Draft
from tests.engine.harness import Harness, flex, online
from tests.engine.scheduler.test_victims import draft_of


def due_streams(draft: Draft) -> list[str]:
    return [request.request_id for request in draft.table.requests_of(draft.decoding_streams())]


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

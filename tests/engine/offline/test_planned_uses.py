"""When prefixes come next, while rows are handed out, come back and are planned anew."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.kv.prefix_nodes import NEXT, PrefixNode
from neaptide.engine.offline.planned import FIRST_USE, PlannedOrder
from neaptide.engine.offline.planned_uses import NEVER, PlannedUses
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.request import Request
from tests.engine.harness import batch
from tests.engine.offline.planning.orders import plan, two_ends


@given(st.lists(st.integers(0, 20) | st.just(NEVER), max_size=12), st.data())
def test_the_first_use_of_any_rows_that_follow_one_another(uses: list[int], data: st.DataObject) -> None:
    found = PlannedUses(np.array(uses, np.int64))
    left = list(uses)
    for place in data.draw(st.permutations(range(len(uses)))):
        for begin in range(len(uses)):
            for end in range(begin + 1, len(uses) + 1):
                first = min(left[begin:end])
                assert found.first(begin, end) == (None if first == NEVER else first)
        found.leave(place)
        left[place] = NEVER


def looked_up(pool: OfflinePool, requests: list[Request]) -> list[list[int | None]]:
    """Next uses of every request's segments, as the cache has them once it was told."""
    for prefix_node in pool.take_moved_nodes():
        prefix_node.next_use = prefix_node.present_use
    return [[prefix_node.next_use for prefix_node in request.prefix_nodes] for request in requests]


def test_a_prefix_comes_next_with_the_first_of_its_rows_that_waits(tmp_path: Path) -> None:
    shared = [1] * 16
    pool = OfflinePool(by_prefix=True)
    pool.add_batch(batch(tmp_path, "a", [[*shared, 2], [3] * 16, [*shared, 4], [*shared, 5]]), 0.0, 64)
    pool.follow(PlannedOrder.of(plan(("a", 2), ("a", 1), ("a", 0))))
    first = pool.pop()
    assert first.request_id == "a:2"
    assert looked_up(pool, [first]) == [[FIRST_USE + 2, None]]
    assert [pool.pop().request_id for _ in range(2)] == ["a:1", "a:0"]
    assert looked_up(pool, [first]) == [[None, None]]  # row 3 waits, but no plan knows it
    pool.give_back(first)
    assert looked_up(pool, [first]) == [[NEXT, NEXT]]
    assert pool.pop() is first
    assert looked_up(pool, [first]) == [[None, None]]


def test_with_two_ends_a_row_comes_when_the_ends_are_expected_to_reach_it(tmp_path: Path) -> None:
    prompts = [[group] * 16 + [9] * row for row, group in enumerate([1, 1, 2, 2])]
    pool = OfflinePool(by_prefix=True)
    pool.add_batch(batch(tmp_path, "a", prompts), 0.0, 64)
    ends = two_ends([1] * 4, [4.0, 3.0, 2.0, 1.0], 2.5, turns=[0, 2, 3, 1])
    pool.follow(PlannedOrder.of(plan(("a", 0), ("a", 1), ("a", 2), ("a", 3), ends=ends)))
    requests = list(pool)
    assert {r.request_id: r.prefix_nodes[0].next_use for r in requests} == {
        "a:0": FIRST_USE,
        "a:1": FIRST_USE,
        "a:2": FIRST_USE + 1,
        "a:3": FIRST_USE + 1,
    }


PROMPTS = st.lists(
    st.lists(st.integers(1, 2), min_size=1, max_size=3).map(lambda units: [u for u in units for _ in range(16)] + [7]),
    min_size=1,
    max_size=8,
)


@given(PROMPTS, st.data())
@settings(max_examples=60)
def test_next_uses_are_those_of_a_recount(prompts: list[list[int]], data: st.DataObject) -> None:
    rows = range(len(prompts))
    pool = OfflinePool(by_prefix=True)
    with TemporaryDirectory() as directory:
        pool.add_batch(batch(Path(directory), "a", prompts), 0.0, 64)
    handed_out: dict[int, Request] = {}
    for _ in range(2):
        order = data.draw(st.permutations(rows))[: data.draw(st.integers(0, len(rows)))]
        pool.follow(PlannedOrder.of(plan(*(("a", row) for row in order))))
        for move in data.draw(st.lists(st.sampled_from(["pop", "abort", "back"]), max_size=6)):
            if move == "back" and handed_out:
                pool.give_back(handed_out.pop(data.draw(st.sampled_from(sorted(handed_out)))))
            elif len(pool):
                request = next(iter(pool)) if move == "abort" else pool.pop()
                if move == "abort":
                    pool.remove(request.request_id)
                else:
                    handed_out[int(request.request_id.removeprefix("a:"))] = request
        looked_up(pool, [])
        returned = {int(request.request_id.removeprefix("a:")) for request in pool.returned}
        waiting = {int(request.request_id.removeprefix("a:")): request for request in pool.in_turn()}
        for request in [*waiting.values(), *pool.returned, *handed_out.values()]:
            for prefix_node in request.prefix_nodes[:-1]:
                assert prefix_node.next_use == recounted(prefix_node, request, prompts, order, set(waiting), returned)


def recounted(
    prefix_node: PrefixNode,
    request: Request,
    prompts: list[list[int]],
    order: list[int],
    waiting: set[int],
    returned: set[int],
) -> int | None:
    prefix = request.prompt_token_ids[: prefix_node.depth_tokens]
    below = {row for row, prompt in enumerate(prompts) if prompt[: len(prefix)] == list(prefix)}
    if below & returned:
        return NEXT
    return next((FIRST_USE + rank for rank, row in enumerate(order) if row in below & waiting), None)

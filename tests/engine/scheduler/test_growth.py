"""A stream that was preempted comes back where it can stay to its end."""

from collections import Counter

import numpy as np
import pytest

from neaptide.engine.request import Request
from neaptide.engine.scheduler.growth import held_online, most_held_tokens
from tests.engine.harness import Harness, online


@pytest.mark.parametrize(
    ("own", "left", "most"),
    [
        ([10], [5], 15),
        ([10, 10], [5, 5], 30),
        ([10, 10], [1, 20], 30),
        ([10, 1], [2, 9], 15),
        ([3, 2, 1], [30, 20, 10], 45),
    ],
)
def test_the_most_is_held_when_one_of_them_ends(own: list[int], left: list[int], most: int) -> None:
    assert most_held_tokens(sum(own), np.array(own, float), np.array(left, float)) == most


def test_shared_tokens_are_held_once_and_stay() -> None:
    # Two read the same 8 tokens and hold 2 each of their own.
    assert most_held_tokens(8 + 4, np.array([2.0, 2.0]), np.array([1.0, 10.0])) == 12 - 2 + 10


class Preemptions:
    """Counts the preemptions of every step."""

    def __init__(self, harness: Harness) -> None:
        self.counts: Counter[str] = Counter()
        preempt = harness.core.scheduler.queues.preempt

        def counted(request: Request) -> None:
            self.counts[request.request_id] += 1
            preempt(request)

        harness.core.scheduler.queues.preempt = counted  # type: ignore[method-assign]


def crowd(harness: Harness, count: int, max_tokens: int) -> None:
    for index in range(count):
        prompt = [100 * index + token for token in range(8)]
        harness.core.handle(online(f"s{index}", prompt, max_tokens, tpot_slo_s=0.1, ttft_slo_s=1.0))


def test_streams_that_cannot_all_stay_make_way_once_each() -> None:
    """Three of twenty streams of 108 tokens fit. One that comes back at once pushes out the next: 83 times."""
    harness = Harness(100, max_num_seqs=32, max_num_batched_tokens=64)
    preemptions = Preemptions(harness)
    crowd(harness, 20, 100)
    harness.run()
    assert all(len(harness.tokens[f"s{index}"]) == 100 for index in range(20))
    assert preemptions.counts.total() <= 20


def test_a_lone_stream_comes_back_whatever_is_foreseen() -> None:
    harness = Harness(12, max_num_seqs=8, max_num_batched_tokens=64)
    crowd(harness, 2, 40)
    harness.run()
    assert [len(harness.tokens[name]) for name in ("s0", "s1")] == [40, 40]


def test_a_prompt_frees_only_what_it_holds() -> None:
    harness = Harness(100, max_num_seqs=8, max_num_batched_tokens=16)
    harness.core.handle(online("long", list(range(60)), 30))
    harness.step()
    draft = harness.core.scheduler.draft(harness.clock.now())  # Its second part is in the step.
    held = held_online(draft)
    assert (held.tokens.tolist(), held.lacking.tolist(), held.most_left.tolist()) == ([32], [28], [30])
    assert held.own_tokens(draft.kv.pool.num_online).tolist() == [32.0]


def test_what_a_draft_admits_counts_with_its_first_part() -> None:
    harness = Harness(100, max_num_seqs=8, max_num_batched_tokens=16)
    harness.core.handle(online("long", list(range(60)), 30))
    held = held_online(harness.core.scheduler.draft(harness.clock.now()))
    assert (held.tokens.tolist(), held.lacking.tolist(), held.most_left.tolist()) == ([16], [44], [30])


def test_what_one_alone_reads_of_the_cache_is_its_own() -> None:
    """A conversation goes on: nobody else reads its first turn."""
    harness = Harness(100, max_num_seqs=8, max_num_batched_tokens=64)
    harness.core.handle(online("first", list(range(40)), 2))
    harness.run()
    harness.core.handle(online("second", list(range(48)), 10))
    harness.step()
    draft = harness.core.scheduler.draft(harness.clock.now())
    held = held_online(draft)
    assert held.cached.tolist() == [40]
    assert held.own_tokens(draft.kv.pool.num_online).tolist() == [48.0]


def test_what_two_read_of_the_cache_is_no_ones() -> None:
    harness = Harness(100, max_num_seqs=8, max_num_batched_tokens=64)
    harness.core.handle(online("first", list(range(40)), 2))
    harness.run()
    for index in range(2):
        harness.core.handle(online(f"s{index}", [*range(40), *range(100 * index + 100, 100 * index + 108)], 10))
    harness.step()
    draft = harness.core.scheduler.draft(harness.clock.now())
    held = held_online(draft)
    assert held.tokens.tolist() == [48, 48]
    # 40 of 80 are read twice: when one ends the other still reads them.
    assert held.own_tokens(draft.kv.pool.num_online).sum() == 4 * draft.kv.pool.num_online

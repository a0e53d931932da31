"""Blocks with two tenants: which slots are whose, what goes to host memory, and where it comes back to."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.tests.two_tenants.bench import SIZE, Bench
from neaptide.engine.kv.slot_copies import SlotRun


def test_tenants_grow_from_opposite_ends_of_a_block() -> None:
    bench = Bench(num_blocks=1)
    a, b = bench.start("a"), bench.start("B")
    bench.step((a, 1))
    assert not bench.step((b, 2))  # there is room for both
    assert [bench.slot(a, 0), bench.slot(b, 0), bench.slot(b, 1)] == [(0, 3), (0, 0), (0, 1)]
    assert bench.pool.num_online == 1
    assert bench.pool.num_held == 1


def test_only_the_slots_that_are_about_to_be_overwritten_are_saved_the_newest_first() -> None:
    bench = Bench(num_blocks=1)
    a, b = bench.start("a"), bench.start("B")
    bench.step((a, 3))
    assert bench.step((b, 2)).saves == [SlotRun(0, 0, first=1, end=2)]  # a's third token, and no other
    assert bench.step((b, 1)).saves == [SlotRun(0, 0, first=2, end=3)]
    assert bench.tenants.num_away(a) == 2
    assert bench.step((b, 1)).saves == [SlotRun(0, 0, first=3, end=4)]
    assert bench.tenants.held(a) == []
    assert bench.tenants.num_away(a) == 3


def test_slots_come_back_to_their_own_places_when_the_other_tenant_has_ended() -> None:
    bench = Bench(num_blocks=1)
    a, b = bench.start("a"), bench.start("B")
    bench.step((a, 3))
    bench.step((b, 3))
    bench.end(b)
    copies = bench.step((a, 1))
    assert (copies.restores, copies.moves) == ([SlotRun(0, 0, first=1, end=3)], [])
    assert bench.tenants.num_away(a) == 0


def test_beside_another_tenant_they_come_back_to_a_fresh_block_with_what_was_kept() -> None:
    bench = Bench(num_blocks=2)
    a, b, c = bench.start("a"), bench.start("B"), bench.start("C")
    bench.step((a, 3))
    bench.step((c, 1))  # the other block
    bench.step((b, 3))
    bench.end(c)
    assert bench.tenants.blocks_needed(a, 3, 1) == 1
    copies = bench.step((a, 1))
    assert copies.moves == [SlotRun(0, 1, first=3, end=4)]
    assert copies.restores == [SlotRun(0, 1, first=1, end=3)]
    assert bench.tenants.held(a) == [1]


def test_a_tenant_that_would_meet_the_other_one_leaves_without_having_lost_anything() -> None:
    bench = Bench(num_blocks=2)
    a, b, c = bench.start("a"), bench.start("B"), bench.start("C")
    bench.step((a, 2))
    bench.step((c, 1))
    bench.step((b, 2))
    bench.end(c)
    copies = bench.step((a, 1))
    assert (copies.moves, copies.restores, copies.saves) == ([SlotRun(0, 1, first=2, end=4)], [], [])


def test_room_is_kept_for_the_online_token_of_the_same_step() -> None:
    bench = Bench(num_blocks=2)
    a, b, c = bench.start("a"), bench.start("B"), bench.start("C")
    bench.step((a, 2))
    bench.step((c, 1))
    bench.step((b, 1))
    bench.end(c)
    copies = bench.step((a, 1), (b, 1))  # three slots and two: a leaves before they meet
    assert copies.moves == [SlotRun(0, 1, first=2, end=4)]


def test_blocks_with_most_empty_slots_go_first_then_the_youngest_requests_last() -> None:
    bench = Bench(num_blocks=4)
    a, b, c = bench.start("a"), bench.start("b"), bench.start("C")
    bench.step((a, 5), (b, 8))  # a: blocks 0 (full), 1 (one token); b: blocks 2, 3 (full)
    bench.step((c, 9))
    assert bench.tenants.held(c) == [1, 3, 2]


def test_requests_that_take_part_lose_nothing() -> None:
    bench = Bench(num_blocks=2)
    a, b = bench.start("a"), bench.start("b")
    bench.step((a, 1), (b, 1))
    bench.tenants.begin()
    assert bench.tenants.num_preemptible() == 2
    assert bench.tenants.num_preemptible(besides=a) == 1
    bench.tenants.grow(a, 1, 1)
    assert bench.tenants.num_preemptible() == 1


def test_no_more_blocks_are_preempted_than_host_memory_has_room_for() -> None:
    bench = Bench(num_blocks=3, num_host_blocks=2)
    a, b = bench.start("a"), bench.start("B")
    bench.step((a, 12))
    bench.tenants.begin()
    assert bench.tenants.num_preemptible() == 2
    bench.step((b, 8))
    assert bench.tenants.num_preemptible() == 0
    bench.end(b)
    assert bench.tenants.num_preemptible() == 0  # what a has lost is still there
    bench.step((a, 0))
    bench.tenants.begin()
    assert bench.tenants.num_preemptible() == 2


def test_what_is_restored_keeps_its_host_memory_until_the_step_has_been_submitted() -> None:
    bench = Bench(num_blocks=2, num_host_blocks=1)
    a, b, c = bench.start("a"), bench.start("b"), bench.start("C")
    bench.step((a, 4), (b, 4))
    bench.step((c, 4))  # takes b's block
    bench.end(c)
    bench.tenants.begin()
    bench.tenants.grow(b, 4, 0)
    assert bench.tenants.num_preemptible() == 0  # of a's block
    bench.tenants.begin()
    assert bench.tenants.num_preemptible() == 1


def test_a_request_that_is_swapped_out_leaves_all_its_blocks_and_comes_back_whole() -> None:
    bench = Bench(num_blocks=2)
    a = bench.start("a")
    bench.step((a, 6))
    copies = bench.swap_out(a)
    assert (copies.num_saved, copies.num_swapped, copies.num_checkpointed) == (6, 1, 0)
    assert bench.pool.num_available == 2
    assert bench.step((a, 1)).num_restored == 6


def test_a_request_that_is_cut_keeps_what_stands_before() -> None:
    bench = Bench(num_blocks=3)
    a = bench.start("a")
    bench.step((a, 9))
    bench.tenants.cut(a, 1)
    assert bench.tenants.held(a) == [0]
    assert bench.pool.num_available == 2


def test_running_out_of_blocks_is_an_error() -> None:
    bench = Bench(num_blocks=1, num_host_blocks=1)
    a, b = bench.start("a"), bench.start("B")
    bench.step((a, 1))
    bench.tenants.begin()
    with pytest.raises(RuntimeError, match="1 to be preempted"):
        bench.tenants.grow(b, 0, 2 * SIZE)


Move = tuple[str, int, list[int]]
moves = st.tuples(
    st.sampled_from(["start a", "start A", "step", "step", "step", "swap", "end"]),
    st.integers(0, 5),
    st.lists(st.integers(0, 6), max_size=4),
)


@given(st.lists(moves, max_size=40), st.integers(2, 6), st.integers(0, 6))
def test_every_token_is_where_its_request_reads_it_whatever_happens(
    history: list[Move], num_blocks: int, num_host_blocks: int
) -> None:
    """No slot has two owners, no block is lost, and what is read is what was written, through every copy: ``Bench``
    looks at it in every step. Drafts foretell what happens."""
    play(history, Bench(num_blocks, num_host_blocks))


def play(history: list[Move], bench: Bench) -> int:
    """Returns how often an offline tenant lost slots to an online one."""
    num_checkpointed = 0
    for number, (kind, which, counts) in enumerate(history):
        live = list(bench.num_tokens)
        one = live[which % len(live)] if live else None
        if kind.startswith("start"):
            bench.start(kind[-1] * (number + 1))
        elif kind == "end" and one is not None:
            bench.end(one)
        elif kind == "swap" and one is not None and bench.tenants.can_swap_out(one):
            bench.swap_out(one)
        elif kind == "step" and one is not None:
            parts = zip(live[which % len(live) :], counts, strict=False)
            # As in BROS: the online ones take their slots last.
            copies = bench.step(*sorted(parts, key=lambda part: part[0].is_online))
            num_checkpointed += copies.num_checkpointed
    return num_checkpointed


@pytest.mark.parametrize("seed", range(8))
def test_so_it_is_in_long_histories_in_which_slots_are_lost_to_others(seed: int) -> None:
    """Drawn histories are short: in few of them an online tenant takes slots that an offline one has."""
    rng = random.Random(seed)
    kinds = ["start a", "start A", *["step"] * 12, "swap", "end", "end"]
    history = [(rng.choice(kinds), rng.randrange(6), [rng.randrange(4) for _ in range(4)]) for _ in range(300)]
    assert play(history, Bench(num_blocks=5, num_host_blocks=6)) > 0

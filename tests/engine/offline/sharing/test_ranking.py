"""A ranking is sorted whatever moves in it, and a draft of it is what it would be."""

from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.offline.sharing.ranking import Order, Ranking, RankingDraft

moves = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 3))), max_size=30)
"""Members, and the keys that they are given; those that get None are taken out."""


def play(order: Order[int], kept: dict[int, int], member: int, key: int | None) -> None:
    if key is not None:
        kept[member] = key
        order.place(member, (key, member))
    elif member in kept:
        del kept[member]
        order.remove(member)


def check(order: Order[int], kept: dict[int, int]) -> None:
    assert order.first == min(kept, key=lambda member: (kept[member], member), default=None)
    for member in range(6):
        assert (member in order) == (member in kept)
        assert member not in kept or order.key(member) == (kept[member], member)


@settings(max_examples=30, deadline=None)
@given(before=moves, then=moves)
def test_the_first_is_that_of_the_least_key(
    before: list[tuple[int, int | None]], then: list[tuple[int, int | None]]
) -> None:
    ranking, kept = Ranking[int](), dict[int, int]()
    for move in before:
        play(ranking, kept, *move)
        check(ranking, kept)
    untouched = dict(kept)
    draft = RankingDraft(ranking)
    for move in then:
        play(draft, kept, *move)
        check(draft, kept)
    check(ranking, untouched)

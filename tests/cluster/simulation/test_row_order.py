"""Who gets which rows: the most urgent job first, from the end that is asked for, each row once."""

from hypothesis import given
from hypothesis import strategies as st

from neaptide.cluster.lease_order import lines_to_claim
from neaptide.cluster.simulation.row_order import Claim, ClaimOrder


def test_the_most_urgent_job_comes_first_and_both_ends_meet() -> None:
    order = ClaimOrder()
    order.add(0, 50.0, range(200))
    order.add(1, 20.0, range(100))
    claims = [order.claim(from_front, 64) for from_front in (True, False, True, False, True, False)]
    assert claims == [
        Claim(1, tuple(range(64))),
        Claim(1, tuple(range(64, 100))),
        Claim(0, tuple(range(64))),
        Claim(0, tuple(range(136, 200))),
        Claim(0, tuple(range(64, 128))),
        Claim(0, tuple(range(128, 136))),
    ]
    assert order.claim(True, 64) is None
    assert order.first is None


def test_of_equal_deadlines_the_older_job_comes_first() -> None:
    order = ClaimOrder()
    order.add(3, 1.0, [0])
    order.add(2, 1.0, [0])
    assert order.first == 2


def test_what_is_given_back_goes_first() -> None:
    order = ClaimOrder()
    order.add(0, 1.0, range(300))
    claim = order.claim(False, 100)
    assert claim is not None
    order.give_back(Claim(0, claim.rows[:3]))
    order.give_back(Claim(0, ()))
    assert order.claim(True, 100) == Claim(0, (200, 201, 202))


def test_chunks_get_smaller_towards_the_end() -> None:
    assert [lines_to_claim(rows, 4) for rows in (100_000, 4096, 2048, 1024, 10)] == [256, 256, 128, 64, 64]
    assert lines_to_claim(1000, 0) == 250


@given(
    sizes=st.lists(st.integers(0, 300), max_size=4),
    asks=st.lists(st.tuples(st.booleans(), st.integers(1, 256), st.booleans()), max_size=40),
)
def test_every_row_is_claimed_once_however_it_is_asked_for(
    sizes: list[int], asks: list[tuple[bool, int, bool]]
) -> None:
    order, held = ClaimOrder(), set[tuple[int, int]]()
    for job, size in enumerate(sizes):
        order.add(job, float(job % 2), range(size))
    for from_front, num_rows, gives_back in [*asks, *[(True, 256, False)] * 50]:
        claim = order.claim(from_front, num_rows)
        if claim is None:
            break
        assert len(claim.rows) <= num_rows
        if gives_back:
            order.give_back(claim)
            continue
        rows = {(claim.job, row) for row in claim.rows}
        assert not rows & held
        held |= rows
        assert order.num_rows == sum(sizes) - len(held)
    assert len(held) == sum(sizes)

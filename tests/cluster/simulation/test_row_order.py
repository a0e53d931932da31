"""Who gets which rows: the most urgent job first, from the side that is asked for, each row once."""

from hypothesis import given
from hypothesis import strategies as st

from neaptide.cluster.lease_order import Side, lines_to_lease
from neaptide.cluster.simulation.row_order import RowLease, RowOrder

DENSE, SPARSE = Side.COMPUTE_BOUND, Side.MEMORY_BOUND


def test_the_most_urgent_job_comes_first_and_both_sides_meet() -> None:
    order = RowOrder()
    order.add(0, 50.0, range(200))
    order.add(1, 20.0, range(100))
    leases = [order.lease(side, 64) for side in (DENSE, SPARSE, DENSE, SPARSE, DENSE, SPARSE)]
    assert leases == [
        RowLease(1, tuple(range(64))),
        RowLease(1, tuple(range(64, 100))),
        RowLease(0, tuple(range(64))),
        RowLease(0, tuple(range(136, 200))),
        RowLease(0, tuple(range(64, 128))),
        RowLease(0, tuple(range(128, 136))),
    ]
    assert order.lease(DENSE, 64) is None
    assert order.first is None


def test_of_equal_deadlines_the_older_job_comes_first() -> None:
    order = RowOrder()
    order.add(3, 1.0, [0])
    order.add(2, 1.0, [0])
    assert order.first == 2


def test_what_is_given_back_goes_first() -> None:
    order = RowOrder()
    order.add(0, 1.0, range(300))
    lease = order.lease(SPARSE, 100)
    assert lease is not None
    order.give_back(RowLease(0, lease.rows[:3]))
    order.give_back(RowLease(0, ()))
    assert order.lease(DENSE, 100) == RowLease(0, (200, 201, 202))


def test_chunks_get_smaller_towards_the_end() -> None:
    assert [lines_to_lease(rows, 4) for rows in (100_000, 4096, 2048, 1024, 10)] == [256, 256, 128, 64, 64]
    assert lines_to_lease(1000, 0) == 250


@given(
    sizes=st.lists(st.integers(0, 300), max_size=4),
    asks=st.lists(st.tuples(st.sampled_from(Side), st.integers(1, 256), st.booleans()), max_size=40),
)
def test_every_row_is_leased_once_however_it_is_asked_for(sizes: list[int], asks: list[tuple[Side, int, bool]]) -> None:
    order, held = RowOrder(), set[tuple[int, int]]()
    for job, size in enumerate(sizes):
        order.add(job, float(job % 2), range(size))
    for side, num_rows, gives_back in [*asks, *[(DENSE, 256, False)] * 50]:
        lease = order.lease(side, num_rows)
        if lease is None:
            break
        assert len(lease.rows) <= num_rows
        if gives_back:
            order.give_back(lease)
            continue
        rows = {(lease.job, row) for row in lease.rows}
        assert not rows & held
        held |= rows
        assert order.num_rows == sum(sizes) - len(held)
    assert len(held) == sum(sizes)

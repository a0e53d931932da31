"""The request table's named operations against plain Python over the requests that sit in it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.queues import deadline_order
from neaptide.engine.table import RequestTable

NUM_SEATS = 12
MAX_TOKENS = 16
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Row:
    """A request some way through its life."""

    tier: Tier = Tier.DEFAULT
    prompt_tokens: int = 4
    output_tokens: int = 0
    """Known ones."""
    left: int = 1
    """Tokens still to compute."""
    samples: bool = False
    """A step in flight samples one more token, which another will follow."""
    arrival_s: float = 0.0
    ttft_s: float = 1.0
    tpot_s: float = 0.1
    first_token_s: float = 0.0
    last_step: int = -1


times = st.sampled_from([0.0, 0.25, 0.5, 1.0])
rows = st.builds(
    Row,
    tier=st.sampled_from([Tier.PRIORITY, Tier.DEFAULT, Tier.FLEX]),
    prompt_tokens=st.integers(1, 6),
    output_tokens=st.integers(0, 4),
    left=st.integers(0, 3),
    samples=st.booleans(),
    arrival_s=times,
    ttft_s=times,
    tpot_s=times,
    first_token_s=times,
    last_step=st.integers(-1, 2),
)
populations = st.lists(rows, max_size=NUM_SEATS)


class Hall:
    """A table with requests on seats in no particular order, some seats having been left."""

    def __init__(self, population: list[Row], shuffled_ids: list[int]) -> None:
        self.table = RequestTable(NUM_SEATS, MAX_TOKENS, BLOCK_SIZE)
        self.requests: list[Request] = []
        guests = [make_request(f"guest{index}", Row()) for index in range(NUM_SEATS - len(population))]
        for index, guest in enumerate(guests):
            guest.assign_slot(self.table, index)
        for index, row in enumerate(population):
            self.slot(make_request(f"r{shuffled_ids[index]:02}", row), row, shuffled_ids[-1 - index])
        for guest in guests:
            guest.free_slot(RequestStatus.FINISHED)

    def slot(self, request: Request, row: Row, admission_index: int) -> None:
        table = self.table
        request.assign_slot(table, admission_index)
        table.total[request.slot] += row.samples
        table.computed[request.slot] = max(request.num_tokens - row.left, 0)
        table.last_step[request.slot] = row.last_step
        self.requests.append(request)

    def of(self, online: bool, wanted: Callable[[Request], bool]) -> set[str]:
        return {r.request_id for r in self.requests if r.is_online == online and wanted(r)}

    def named(self, slots: np.ndarray) -> list[str]:
        return [request.request_id for request in self.table.requests_of(slots)]

    @property
    def slots(self) -> np.ndarray:
        return np.array([request.slot for request in self.requests], np.int64)


def make_request(request_id: str, row: Row) -> Request:
    params = SamplingParams(max_tokens=8)
    request = Request(request_id, [7] * row.prompt_tokens, params, row.tier, row.arrival_s, row.ttft_s, row.tpot_s)
    request._output_token_ids = list(range(10, 10 + row.output_tokens))
    request.first_token_s = row.first_token_s
    return request


halls = st.builds(Hall, populations, st.permutations(range(NUM_SEATS)))
for_halls = settings(deadline=None)


# ---- which rows ----


@for_halls
@given(halls, st.booleans())
def test_rows_are_chosen_by_what_they_lack(hall: Hall, online: bool) -> None:
    ones, more = (rows.of(online) for rows in hall.table.lacking(0.0))
    for chosen, wanted in (
        (ones, lambda r: r.num_uncomputed_tokens == 1),
        (more, lambda r: r.num_uncomputed_tokens > 1),
    ):
        assert set(hall.named(chosen)) == hall.of(online, wanted)
        assert len(chosen) == len(set(chosen.tolist()))


@for_halls
@given(halls)
def test_rows_with_output_keep_their_order(hall: Hall) -> None:
    expected = [request.request_id for request in hall.requests if request.num_output_tokens > 0]
    assert hall.named(hall.table.with_output(hall.slots).rows) == expected


@for_halls
@given(halls)
def test_what_rows_with_output_are_bounded_by(hall: Hall) -> None:
    streams = hall.table.with_output(hall.slots)
    requests = hall.table.requests_of(streams.rows)
    assert streams.total.tolist() == [request.num_tokens for request in requests]
    assert streams.num_output.tolist() == [request.num_output_tokens for request in requests]
    assert streams.tpot_slo_s.tolist() == [request.tpot_slo_s for request in requests]
    assert streams.due_s.tolist() == [request.next_deadline_s for request in requests]


def test_rows_that_all_have_output_are_the_array_that_was_given() -> None:
    hall = Hall([Row(output_tokens=1), Row(output_tokens=3)], list(range(NUM_SEATS)))
    slots = hall.slots
    assert hall.table.with_output(slots).rows is slots


@for_halls
@given(halls)
def test_when_the_next_token_of_each_row_is_due(hall: Hall) -> None:
    assert hall.table.next_deadline_s(hall.slots).tolist() == [request.next_deadline_s for request in hall.requests]


# ---- in which order ----


@for_halls
@given(halls)
def test_rows_in_deadline_order_are_requests_in_deadline_order(hall: Hall) -> None:
    expected = [request.request_id for request in sorted(hall.requests, key=deadline_order)]
    assert hall.named(hall.table.by_deadline(hall.slots)) == expected


@for_halls
@given(halls)
def test_rows_by_last_step_and_by_admission(hall: Hall) -> None:
    by_last_step = sorted(hall.requests, key=lambda r: (r.last_step, r.admission_index))
    by_admission = sorted(hall.requests, key=lambda r: r.admission_index)
    assert hall.named(hall.table.by_last_step(hall.slots)) == [r.request_id for r in by_last_step]
    assert hall.named(hall.table.by_admission(hall.slots)) == [r.request_id for r in by_admission]


def test_equal_deadlines_go_by_priority_then_age_then_name() -> None:
    hall = Hall([], list(range(NUM_SEATS)))
    plain = Row(arrival_s=0.5, ttft_s=0.5)
    for name, row in {
        "b": plain,
        "a": plain,
        "older": replace(plain, arrival_s=0.25, ttft_s=0.75),
        "first": replace(plain, tier=Tier.PRIORITY),
        "late": replace(plain, ttft_s=9.0, tier=Tier.PRIORITY),
    }.items():
        hall.slot(make_request(name, row), row, 1)
    assert hall.named(hall.table.by_deadline(hall.slots)) == ["first", "older", "a", "b", "late"]


def test_requests_without_a_deadline_stand_last() -> None:
    hall = Hall([], list(range(NUM_SEATS)))
    for name, ttft_s in (("never", math.inf), ("now", 0.0), ("also never", math.inf)):
        row = Row(ttft_s=ttft_s)
        hall.slot(make_request(name, row), row, 1)
    assert hall.named(hall.table.by_deadline(hall.slots)) == ["now", "also never", "never"]


def test_a_token_being_sampled_counts_for_the_next_deadline() -> None:
    row = Row(output_tokens=2, samples=True, first_token_s=3.0, tpot_s=0.5)
    hall = Hall([row], list(range(NUM_SEATS)))
    assert hall.table.next_deadline_s(hall.slots).tolist() == [4.5]


# ---- seats ----


def test_a_request_is_a_view_on_its_row() -> None:
    table = RequestTable(2, MAX_TOKENS, BLOCK_SIZE)
    request = make_request("a", Row(prompt_tokens=3, output_tokens=2))
    request.assign_slot(table, 5)
    table.tokens[request.slot, 5] = 99
    table.known[request.slot] = table.total[request.slot] = 6
    table.computed[request.slot] = 5
    table.first_token_s[request.slot] = 1.5
    assert request.token_ids.tolist() == [7, 7, 7, 10, 11, 99]
    assert (request.num_tokens, request.num_computed_tokens, request.num_output_tokens) == (6, 5, 3)
    assert (request.first_token_s, request.admission_index, request.last_step) == (1.5, 5, -1)
    assert table.request(request.slot) is request
    assert (table.ids[request.slot], int(table.limit[request.slot]), int(table.prompt[request.slot])) == ("a", 11, 3)


def test_what_a_request_has_said_survives_its_seat_and_what_was_computed_does_not() -> None:
    table = RequestTable(1, MAX_TOKENS, BLOCK_SIZE)
    request = make_request("a", Row(prompt_tokens=3, output_tokens=2, first_token_s=0.5))
    request.assign_slot(table, 1)
    table.total[0] += 1  # a step in flight samples another
    table.computed[0], table.last_step[0], table.first_token_s[0] = 5, 7, 0.75
    request.free_slot(RequestStatus.WAITING)
    assert (request.slot, request.table, request.status) == (-1, None, RequestStatus.WAITING)
    assert request.token_ids.tolist() == [7, 7, 7, 10, 11]
    assert (request.num_tokens, request.num_computed_tokens, request.last_step) == (5, 0, -1)
    assert request.first_token_s == 0.75
    request.assign_slot(table, 2)
    assert (request.num_tokens, request.num_computed_tokens, request.last_step) == (5, 0, -1)
    assert (request.first_token_s, request.admission_index) == (0.75, 2)


def test_the_next_request_on_a_seat_inherits_nothing() -> None:
    table = RequestTable(1, MAX_TOKENS, BLOCK_SIZE)
    params = SamplingParams(max_tokens=7, min_tokens=2, ignore_eos=True, stop_token_ids=(3,))
    first = Request("a", [7] * 9, params, Tier.PRIORITY, 1.0, 0.5, 0.25)
    first.assign_slot(table, 1)
    table.computed[0] = table.indexed[0] = 2
    table.last_step[0] = 4
    first.free_slot(RequestStatus.FINISHED)
    fresh = RequestTable(1, MAX_TOKENS, BLOCK_SIZE)
    for each in (table, fresh):
        flex = Request("b", [8], SamplingParams(max_tokens=2), Tier.FLEX, 0.0, report_every_step=False)
        flex.assign_slot(each, 2)
    columns = [name for name, value in vars(fresh).items() if isinstance(value, np.ndarray)]
    assert len(columns) > 15
    for name in columns:
        if name not in ("tokens", "token_blocks", "epoch"):
            assert getattr(table, name).tolist() == getattr(fresh, name).tolist(), name
    assert table.tokens[0, :1].tolist() == [8]


def test_every_change_of_a_seat_begins_another_epoch() -> None:
    table = RequestTable(2, MAX_TOKENS, BLOCK_SIZE)
    requests = [make_request(name, Row()) for name in "ab"]
    seen = []
    for request in requests:
        request.assign_slot(table, 1)
        seen.append(int(table.epoch[request.slot]))
    table.renew(requests[0].slot)
    seen.append(int(table.epoch[requests[0].slot]))
    slot = requests[1].slot
    requests[1].free_slot(RequestStatus.WAITING)
    seen.append(int(table.epoch[slot]))
    requests[1].assign_slot(table, 2)
    assert requests[1].slot == slot
    seen.append(int(table.epoch[slot]))
    assert len(set(seen)) == len(seen)


def test_no_more_requests_sit_than_there_are_seats() -> None:
    table = RequestTable(1, MAX_TOKENS, BLOCK_SIZE)
    make_request("a", Row()).assign_slot(table, 1)
    with pytest.raises(IndexError):
        make_request("b", Row()).assign_slot(table, 2)


def test_a_row_that_holds_blocks_is_not_left() -> None:
    table = RequestTable(1, MAX_TOKENS, BLOCK_SIZE)
    request = make_request("a", Row())
    request.assign_slot(table, 1)
    table.blocks.append(0, [3])
    with pytest.raises(AssertionError):
        request.free_slot(RequestStatus.WAITING)


# ---- invariants ----


def free_twice(table: RequestTable) -> None:
    table._free.append(table._free[0])


def dead_with_a_slot(table: RequestTable) -> None:
    table.live[0] = False


def more_computed_than_there_is(table: RequestTable) -> None:
    table.computed[0] = 5


def computed_without_a_block(table: RequestTable) -> None:
    table.blocks.cut(0, 0)


def published_too_much(table: RequestTable) -> None:
    table.indexed[0] = 2


def blocks_of_nobody(table: RequestTable) -> None:
    table.blocks.append(1, [9])


@pytest.mark.parametrize(
    "damage",
    [
        free_twice,
        dead_with_a_slot,
        more_computed_than_there_is,
        computed_without_a_block,
        published_too_much,
        blocks_of_nobody,
    ],
)
def test_a_damaged_table_is_noticed(damage: Callable[[RequestTable], None]) -> None:
    table = RequestTable(2, MAX_TOKENS, BLOCK_SIZE)
    make_request("a", Row()).assign_slot(table, 1)
    table.blocks.append(0, [3])
    table.computed[0], table.indexed[0] = 4, 1
    table.check_integrity()
    damage(table)
    with pytest.raises(AssertionError):
        table.check_integrity()

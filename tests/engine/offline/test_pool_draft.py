"""A draft of the offline pool hands out what the pool hands out when the draft is applied, and changes nothing."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.pool_draft import PoolDraft
from neaptide.engine.offline.row_source import RowKey
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from tests.engine.harness import batch

MAX_NUM_TOKENS = 64
PROMPTS = [[5], [3, 3], [9], [3, 1], [7], [5]]
"""Of the batch's rows; the first and the last are equal."""


def by_prompt(tokens: object, row: int) -> list[int]:
    return PROMPTS[row]


@dataclass(frozen=True)
class Content:
    """What a pool holds in the beginning."""

    row_key: RowKey | None
    messages: list[int]
    """Where the batch's rows are cut into messages."""
    num_flex: int
    num_preempted: int

    def pool(self, message: AddBatch) -> OfflinePool:
        pool = OfflinePool(self.row_key)
        cuts = sorted({0, *self.messages, len(PROMPTS)})
        for start, end in pairwise(cuts):
            rows = list(range(start, end))
            part = AddBatch("job", message.path, rows, message.params_table, [0] * len(rows), [], 1e9)
            assert pool.add_batch(part, 0.0, MAX_NUM_TOKENS) == []
        for index in range(self.num_flex):
            pool.add_flex(request(f"flex{index}"))
        for index in range(self.num_preempted):
            pool.give_back(request(f"preempted{index}"))
        return pool


def request(request_id: str) -> Request:
    return Request(request_id, [7], SamplingParams(), Tier.FLEX, 0.0)


contents = st.builds(
    Content,
    st.sampled_from([None, by_prompt]),
    st.lists(st.integers(1, len(PROMPTS) - 1), max_size=2),
    st.integers(0, 2),
    st.integers(0, 3),
)
operations = st.lists(
    st.one_of(st.just("pop"), st.just("look"), st.tuples(st.sampled_from(["give back", "take"]), st.integers(0, 9))),
    max_size=20,
)
Operation = str | tuple[str, int]


@dataclass
class Player:
    """Plays operations on a pool or on a draft of it."""

    pool: OfflinePool | PoolDraft
    returned: list[Request]
    """Preempted requests in the pool."""
    out: list[Request] = field(default_factory=list)

    def play(self, operation: Operation) -> tuple[Request | None, int]:
        """Returns the request concerned, if there is one, and how many are left."""
        concerned: Request | None = None
        match operation:
            case "look":
                concerned = self._first()
            case "pop" if len(self.pool):
                concerned = self.pool.pop()
                self.out.append(concerned)
                if concerned in self.returned:
                    self.returned.remove(concerned)
            case ("give back", index) if self.out:
                concerned = self.out.pop(int(index) % len(self.out))
                self.pool.give_back(concerned)
                self.returned.append(concerned)
            case ("take", index) if self.returned:
                concerned = self.returned.pop(int(index) % len(self.returned))
                self._take(concerned)
                self.out.append(concerned)
        return concerned, len(self.pool)

    def _first(self) -> Request | None:
        return self.pool.peek() if isinstance(self.pool, PoolDraft) else next(iter(self.pool), None)

    def _take(self, preempted: Request) -> None:
        if isinstance(self.pool, PoolDraft):
            self.pool.take(preempted)
        else:
            self.pool.take(preempted)


@pytest.fixture(scope="module")
def message(tmp_path_factory: pytest.TempPathFactory) -> AddBatch:
    return batch(tmp_path_factory.mktemp("rows"), "job", PROMPTS)


@given(content=contents, then=operations)
def test_the_pool_does_afterwards_what_the_draft_did(
    message: AddBatch, content: Content, then: list[Operation]
) -> None:
    pool = content.pool(message)
    drafted, player = Player(PoolDraft(pool), list(pool.returned)), Player(pool, list(pool.returned))
    foreseen = [drafted.play(operation) for operation in then]
    left = [drafted.pool.pop() for _ in range(len(drafted.pool))]
    # The very requests: what a draft finds out about one is true of the one that the pool hands out.
    assert [player.play(operation) for operation in then] == foreseen
    assert [pool.pop() for _ in range(len(pool))] == left


@given(content=contents, then=operations)
def test_a_draft_changes_nothing_so_that_another_gives_the_same(
    message: AddBatch, content: Content, then: list[Operation]
) -> None:
    pool, untouched = content.pool(message), content.pool(message)
    players = [Player(PoolDraft(pool), list(pool.returned)) for _ in range(2)]
    first, second = ([player.play(operation) for operation in then] for player in players)
    assert first == second
    assert len(pool) == len(untouched)
    assert [r.request_id for r in pool] == [r.request_id for r in untouched]


def test_the_order_is_preempted_then_flex_then_rows_by_their_key(message: AddBatch) -> None:
    draft = PoolDraft(Content(by_prompt, [2], num_flex=1, num_preempted=2).pool(message))
    assert [draft.pop().request_id for _ in range(len(draft))] == [
        *("preempted1", "preempted0", "flex0"),
        *("job:3", "job:1", "job:0", "job:5", "job:4", "job:2"),
    ]
    assert draft.peek() is None


def test_a_row_is_announced_once_however_many_drafts_look_at_it(message: AddBatch) -> None:
    pool = Content(None, [], num_flex=0, num_preempted=0).pool(message)
    for _ in range(2):
        PoolDraft(pool).peek()
    assert [r.request_id for r in pool.take_first_materialized()] == ["job:0"]
    draft = PoolDraft(pool)
    draft.pop()
    draft.peek()
    assert [r.request_id for r in pool.take_first_materialized()] == ["job:1"]


def test_a_request_is_taken_from_anywhere_and_the_others_keep_their_order(message: AddBatch) -> None:
    pool = Content(None, [], num_flex=2, num_preempted=0).pool(message)
    _, flex, first, second, *_ = pool.in_turn()
    draft = PoolDraft(pool)
    draft.peek()
    for request in (second, flex):
        draft.take(request)
    num_left = len(draft)
    left = [draft.pop() for _ in range(num_left)]
    assert [request.request_id for request in left] == ["flex0", "job:0", "job:2", "job:3", "job:4", "job:5"]
    assert left[1] is first
    for request in (second, flex):
        pool.take(request)
    assert [pool.pop() for _ in range(len(pool))] == left

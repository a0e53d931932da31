"""The cost of computed prefixes, split among their readers: against a count of every single block."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.record import block_costs
from neaptide.engine.record.block_costs import BlockCosts, CostAccount

SIZE = 4
NUM_BLOCKS = 24
NUM_SLOTS = 4


@dataclass
class PlainBlock:
    """A block with what is still split among its readers."""

    readers: Counter[int] = field(default_factory=Counter)
    open_s: float = 0.0


class PlainCosts:
    """The rule, block by block."""

    def __init__(self) -> None:
        self.paid: Counter[int] = Counter()
        self.ended: set[int] = set()
        self.blocks: dict[int, PlainBlock] = {}

    def _settled(self, block: PlainBlock) -> int:
        for account in self.ended & set(block.readers):
            block.open_s *= 1 - block.readers[account] / block.readers.total()
            del block.readers[account]
        return block.readers.total()

    def begin(self, number: int, account: int) -> None:
        self.blocks[number] = PlainBlock(Counter({account: 1}))

    def compute(self, number: int, account: int, seconds: float) -> None:
        block = self.blocks[number]
        if not (num_readers := self._settled(block)):
            self.paid[account] += seconds
            return
        block.open_s += seconds
        for reader, count in block.readers.items():
            self.paid[reader] += seconds * count / num_readers

    def join(self, number: int, account: int) -> None:
        block = self.blocks[number]
        if not (num_readers := self._settled(block)):
            block.open_s = 0.0
        for reader, count in block.readers.items():
            self.paid[reader] -= block.open_s * count / num_readers
        block.readers[account] += 1
        for reader, count in block.readers.items():
            self.paid[reader] += block.open_s * count / (num_readers + 1)


class Both:
    """``BlockCosts`` and the plain rule, fed alike. Each path is a list of blocks that slots extend."""

    def __init__(self) -> None:
        self.costs = BlockCosts(NUM_BLOCKS, NUM_SLOTS, SIZE)
        self.plain = PlainCosts()
        self.accounts = [CostAccount(str(number), "batch", str(number), number) for number in range(3)]
        self.tables = np.zeros((NUM_SLOTS, NUM_BLOCKS), np.int64)
        self.num_tokens = [0] * NUM_SLOTS
        self.owner = [0] * NUM_SLOTS
        self.spent_s = 0.0

    def admit(self, slot: int, account: int, source: int, num_blocks: int) -> None:
        """Another request in the slot, which finds up to ``num_blocks`` blocks of the source's prefix."""
        found = 0 if slot == source else min(num_blocks, self.num_tokens[source] // SIZE)
        self.costs.begin(slot)
        self.owner[slot], self.num_tokens[slot] = account, found * SIZE
        self.tables[slot, :found] = self.tables[source, :found]
        if found:
            self.costs.join(self.accounts[account], self.tables[slot, :found])
            for block in self.tables[slot, :found].tolist():
                self.plain.join(block, account)

    def chunk(self, slot: int, num_tokens: int, token_s: float, reader: int | None = None) -> None:
        """A chunk of a slot's prompt; while it is computed another request may read what is full of it."""
        held = set(self.tables[slot, : -(-self.num_tokens[slot] // SIZE)].tolist())
        free = [block for block in range(NUM_BLOCKS) if block not in held and block not in self._held_by_others(slot)]
        start, account = self.num_tokens[slot], self.owner[slot]
        first, last = -(-start // SIZE), -(-(start + num_tokens) // SIZE)
        if last - first > len(free) or last > NUM_BLOCKS:
            return
        for index, block in zip(range(first, last), free, strict=False):
            self.tables[slot, index] = block
            self.plain.begin(block, account)
        slots, starts, counts = (np.array([value]) for value in (slot, start, num_tokens))
        payers = [self.accounts[account]]
        planned = self.costs.chunks(np.array([0]), slots, starts, counts, self.tables, payers)
        self.num_tokens[slot] += num_tokens
        if reader is not None and reader != slot:
            self.admit(reader, (account + 1) % 3, slot, NUM_BLOCKS)
        payers[0].device_s += num_tokens * token_s
        self.spent_s += num_tokens * token_s
        self.costs.computed(planned, payers, np.array([token_s]))
        for position in range(start, start + num_tokens):
            self.plain.compute(int(self.tables[slot, position // SIZE]), account, token_s)

    def _held_by_others(self, slot: int) -> set[int]:
        others = (other for other in range(NUM_SLOTS) if other != slot)
        return {block for other in others for block in self.tables[other, : -(-self.num_tokens[other] // SIZE)]}

    def end(self, account: int) -> None:
        """The account ends, and another takes its place; its requests go on with it as readers of nothing."""
        self.accounts[account].is_open = False
        self.plain.ended.add(account)


step = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 3), st.integers(0, 2), st.integers(0, 3), st.integers(0, 8)),
    st.tuples(
        st.just("chunk"),
        st.integers(0, 3),
        st.integers(1, 14),
        st.floats(0.5, 2.0),
        st.one_of(st.none(), st.integers(0, 3)),
    ),
    st.tuples(st.just("end"), st.integers(0, 2)),
)


@settings(max_examples=60)
@given(st.lists(step, max_size=30))
def test_every_reader_has_paid_an_equal_share_and_the_sum_is_exact(
    steps: list[tuple[str, int]],
) -> None:
    both = Both()
    for name, *arguments in steps:
        if name != "end" or len(both.plain.ended) < 2:
            getattr(both, name)(*arguments)
    paid = [account.device_s for account in both.accounts]
    assert paid == pytest.approx([both.plain.paid[number] for number in range(3)], abs=1e-9)
    assert sum(paid) == pytest.approx(both.spent_s)


def test_runs_without_blocks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_costs, "MIN_RUNS", 4)
    both = Both()
    for _ in range(100):
        both.admit(0, 0, 0, 0)
        both.chunk(0, 4, 1.0)
    assert len(both.costs._runs) <= 2 * 1024 + 1
    both.costs._num_kept = 4
    for _ in range(100):
        both.admit(0, 0, 0, 0)
        both.chunk(0, 4, 1.0)
    assert len(both.costs._runs) <= 9 + NUM_BLOCKS

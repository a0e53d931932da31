"""Splits the cost of computed prefixes among the requests that read them.

Who computes a block pays for it first. Each later reader takes over a part, so that at any time every reader has paid
an equal share. Reading means a hit of the prefix cache: a reader of 200 pays a 200th, whoever computed the block.

An account that has ended is settled: what it has paid stays paid, and later readers get that part for free. A block
that is computed again begins anew. Tokens of answers are not shared: they are the work of their own request.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import FloatArray, IntArray, TokenArray

NO_RUN = 0
LEAST_OPEN_PART = 1e-9
"""Open part below which a run counts as settled."""
MIN_RUNS = 1024
"""Runs that are kept without a search for forgotten ones."""


class CostAccount:
    """Cost of one batch, or of the chats or flex requests of one key, since the last report."""

    __slots__ = (
        "batch_id",
        "cached_tokens",
        "computed_s",
        "computed_tokens",
        "decode_tokens",
        "device_s",
        "is_open",
        "num_preemptions",
        "number",
        "prefill_tokens",
        "recomputed_tokens",
        "share",
        "work",
    )

    def __init__(self, share: str, work: str, batch_id: str, number: int) -> None:
        self.share = share
        self.work = work
        self.batch_id = batch_id
        self.number = number
        self.is_open = True
        """Whether costs may still move to it and from it."""
        self.reset()

    def reset(self) -> None:
        self.device_s = self.computed_s = self.prefill_tokens = 0.0
        self.computed_tokens = self.decode_tokens = 0
        self.recomputed_tokens = self.cached_tokens = self.num_preemptions = 0

    @property
    def has_changed(self) -> bool:
        counts = (self.computed_s, self.device_s, self.prefill_tokens, self.cached_tokens, self.num_preemptions)
        return any(counts)


class BlockRun:
    """Consecutive blocks of one prefix that the same requests read."""

    __slots__ = ("end", "is_growing", "number", "open_part", "readers")

    def __init__(self, number: int, readers: dict[CostAccount, int], end: int, open_part: float = 1.0) -> None:
        self.number = number
        self.readers = readers
        """Number of requests of each account."""
        self.end = end
        """Number of blocks from the prompt's start to the run's end."""
        self.open_part = open_part
        """Part of the cost that accounts which have not ended have paid."""
        self.is_growing = True
        """Whether its request adds further blocks. Not once it has another reader, who has the present ones only."""

    def settle(self) -> None:
        """Removes readers that have ended, with what they have paid."""
        num_readers = sum(self.readers.values())
        ended = [account for account in self.readers if not account.is_open]
        if ended:
            num_ended = sum(self.readers.pop(account) for account in ended)
            self.open_part *= 1.0 - num_ended / num_readers


class PrefillBlocks(NamedTuple):
    """Blocks that the prefill chunks of a planned step compute."""

    parts: IntArray
    """[chunks] the step's parts that are chunks."""
    bounds: list[int]
    """[chunks + 1] where each chunk's blocks begin in ``blocks``."""
    blocks: IntArray
    tokens: IntArray
    """[blocks] tokens that are computed in each."""
    runs: list[BlockRun]
    """[chunks]"""


class BlockCosts:
    """Costs of the blocks of a KV cache, and who reads them.

    Args:
        num_slots: slots of the request table.
    """

    def __init__(self, num_blocks: int, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._run_of_block = np.zeros(num_blocks, np.int64)
        self._cost_s = np.zeros(num_blocks)
        self._cost_tokens = np.zeros(num_blocks)
        self._runs: dict[int, BlockRun] = {}
        self._num_made = 0
        self._num_kept = MIN_RUNS
        self._growing: list[BlockRun | None] = [None] * num_slots
        """Run of each slot's request to which its next blocks are added."""

    # ---- planned steps ----

    def begin(self, slot: int) -> None:
        """Notes that another request has the slot."""
        self._growing[slot] = None

    def forget(self, blocks: IntArray | TokenArray) -> None:
        """Notes that these blocks have new contents of which nobody is charged a share."""
        self._run_of_block[blocks] = NO_RUN

    def chunks(
        self,
        parts: IntArray,
        slots: IntArray,
        starts: IntArray,
        num_tokens: IntArray,
        tables: TokenArray,
        accounts: list[CostAccount],
    ) -> PrefillBlocks:
        """Notes the prefill chunks of a planned step.

        Args:
            starts, num_tokens: [chunks] tokens before each chunk, and its own.
            tables: block tables of all slots.
            accounts: [chunks]
        """
        size = self._block_size
        ends = starts + num_tokens
        first, last = starts // size, -(-ends // size)
        counts = last - first
        bounds = np.concatenate(([0], np.cumsum(counts)))
        index = np.arange(bounds[-1]) - np.repeat(bounds[:-1] - first, counts)
        blocks = tables[np.repeat(slots, counts), index].astype(np.int64)
        begin = np.maximum(index * size, np.repeat(starts, counts))
        tokens = np.minimum((index + 1) * size, np.repeat(ends, counts)) - begin
        runs = [
            self._run_of_slot(slot, account, end)
            for slot, account, end in zip(slots.tolist(), accounts, last.tolist(), strict=True)
        ]
        # The first block of a chunk may have begun with the chunk before.
        is_new = begin == index * size
        new = blocks[is_new]
        numbers = np.repeat(np.array([run.number for run in runs], np.int64), counts)
        self._run_of_block[new] = numbers[is_new]
        self._cost_s[new] = self._cost_tokens[new] = 0.0
        return PrefillBlocks(parts, bounds.tolist(), blocks, tokens, runs)

    def _run_of_slot(self, slot: int, account: CostAccount, end: int) -> BlockRun:
        run = self._growing[slot]
        if run is None or not run.is_growing:
            run = self._growing[slot] = self._make({account: 1}, end)
        run.end = end
        return run

    def _make(self, readers: dict[CostAccount, int], end: int, open_part: float = 1.0) -> BlockRun:
        if len(self._runs) > 2 * self._num_kept:
            self._forget_runs()
        self._num_made += 1
        run = self._runs[self._num_made] = BlockRun(self._num_made, readers, end, open_part)
        return run

    def _forget_runs(self) -> None:
        """Drops runs without blocks."""
        growing = [run.number for run in self._growing if run is not None]
        is_there = np.zeros(self._num_made + 1, np.bool_)
        is_there[self._run_of_block] = True
        is_there[growing] = True
        self._runs = {number: run for number, run in self._runs.items() if is_there[number]}
        self._num_kept = max(len(self._runs), MIN_RUNS)

    def join(self, account: CostAccount, blocks: IntArray | TokenArray, first: int = 0) -> None:
        """Adds a reader of a prefix's blocks from index ``first`` on; it takes over an equal share of their cost."""
        for number, start, end in self._spans(blocks, first):
            run = self._runs.get(number)
            if run is None:
                continue
            read = blocks[start:end]
            run.settle()
            num_readers = sum(run.readers.values())
            cost_s = run.open_part * float(self._cost_s[read].sum())
            tokens = run.open_part * float(self._cost_tokens[read].sum())
            for payer, count in run.readers.items():
                if payer is not account:
                    part = count / num_readers - count / (num_readers + 1)
                    _move(payer, account, part * cost_s, part * tokens)
            self._add_reader(run, account, read, end)

    def _add_reader(self, run: BlockRun, account: CostAccount, read: IntArray | TokenArray, end: int) -> None:
        """Gives the blocks that are read a run of their own if they are not the whole run, or if that is settled."""
        is_settled = run.open_part < LEAST_OPEN_PART
        if is_settled:
            self._cost_s[read] = self._cost_tokens[read] = 0.0
        if end < run.end or is_settled:
            open_part = 1.0 if is_settled else run.open_part
            run = self._make(dict(run.readers), end, open_part)
            self._run_of_block[read] = run.number
        run.readers[account] = run.readers.get(account, 0) + 1
        run.is_growing = False

    def _spans(self, blocks: IntArray | TokenArray, first: int = 0) -> list[tuple[int, int, int]]:
        """Run, start and end of consecutive blocks of one run, from index ``first`` on; blocks without run omitted."""
        numbers = self._run_of_block[blocks[first:]]
        if not len(numbers):
            return []
        edges = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        spans = ((start, end) for start, end in pairwise(edges) if numbers[start] != NO_RUN)
        return [(int(numbers[start]), first + start, first + end) for start, end in spans]

    # ---- committed steps ----

    def computed(self, chunks: PrefillBlocks, accounts: list[CostAccount], token_s: FloatArray) -> None:
        """Splits the cost of computed chunks among the readers of their blocks. The accounts have paid it.

        Args:
            accounts: [chunks] who has paid.
            token_s: [chunks] seconds that each token of a chunk has cost.
        """
        counts = np.diff(chunks.bounds)
        cost_s = np.repeat(token_s, counts) * chunks.tokens
        numbers = np.repeat(np.array([run.number for run in chunks.runs], np.int64), counts)
        has_own = self._run_of_block[chunks.blocks] == numbers
        if bool(has_own.all()) and all(run.is_growing for run in chunks.runs):
            self._cost_s[chunks.blocks] += cost_s
            self._cost_tokens[chunks.blocks] += chunks.tokens
            return
        for index, account in enumerate(accounts):
            part = slice(chunks.bounds[index], chunks.bounds[index + 1])
            blocks, of_block_s, tokens = chunks.blocks[part], cost_s[part], chunks.tokens[part]
            for number, start, end in self._spans(blocks):
                run = self._runs.get(number)
                if run is None:
                    continue
                run.settle()
                if run.open_part < LEAST_OPEN_PART:
                    continue
                num_readers = sum(run.readers.values())
                whole_s, whole_tokens = float(of_block_s[start:end].sum()), float(tokens[start:end].sum())
                for reader, count in run.readers.items():
                    if reader is not account:
                        _move(account, reader, whole_s * count / num_readers, whole_tokens * count / num_readers)
                self._cost_s[blocks[start:end]] += of_block_s[start:end] / run.open_part
                self._cost_tokens[blocks[start:end]] += tokens[start:end] / run.open_part


def _move(payer: CostAccount, account: CostAccount, seconds: float, tokens: float) -> None:
    payer.device_s -= seconds
    payer.prefill_tokens -= tokens
    account.device_s += seconds
    account.prefill_tokens += tokens

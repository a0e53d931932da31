"""Charges the device's time to batches and to the chats and flex requests of keys.

A step's time is divided into that of its online and that of its offline work, as the cost model predicts the step
without offline work. Each of the two is split among its requests by what the cost model says that their tokens cost:
matrix products, attention, reads of cached keys and values. A read that serves several decodes is split among them.
The cost of prefixes moves on to their readers (``block_costs``). The sums stay exact.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import BoolArray, FloatArray, IntArray
from neaptide.engine.messages import DeviceCharge
from neaptide.engine.params import Tier
from neaptide.engine.record.block_costs import BlockCosts, CostAccount, PrefillBlocks
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId
from neaptide.engine.scheduler.actions import Admit
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape, StepPlan
from neaptide.engine.steps.step import Step

CHATS, FLEX, BATCH = "chats", "flex", "batch"
"""Kinds of work of an account."""
PRICE_STEPS = 256
"""Steps between two readings of the prices, which the cost model changes slowly."""
LEAST_PRICE_S = 1e-12


class TokenPrices(NamedTuple):
    """Seconds that one more of each adds to a full step."""

    prefill_s: float
    decode_s: float
    pair_s: float
    """A (query, key) pair of prefill attention."""
    kv_s: float
    """A cached token that is read."""


class PlannedCharges(NamedTuple):
    """State when a step was planned, which later steps change."""

    accounts: IntArray
    """[parts] number of each part's account."""
    is_decode: BoolArray | None
    """[parts]; None if all are decodes."""
    saved_reads: FloatArray | None
    """[decodes] cached tokens that each need not read, because others read them too."""
    chunks: PrefillBlocks | None
    recomputed: IntArray | None
    """[parts] tokens that are computed again; None without any."""


class StepCharges:
    """Accounts of one engine. A step takes 20 µs with one request and 50 µs with 64."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        table, kv = scheduler.queues.table, scheduler.kv
        self._account_of_slot = np.zeros(table.num_slots, np.int64)
        self._accounts: dict[tuple[str, str, str], CostAccount] = {}
        self._numbered: list[CostAccount | None] = []
        self._free: list[int] = []
        self._of_batch: dict[str, CostAccount] = {}
        self._blocks = BlockCosts(kv.num_blocks, table.num_slots, kv.block_size) if kv.enable_prefix_cache else None
        self._prices: TokenPrices | None = None
        self._num_priced = 0

    # ---- steps ----

    def planned(self, step: Step, draft: Draft) -> PlannedCharges:
        plan, table, blocks = step.plan, self._scheduler.queues.table, self._blocks
        admitted = [action for action in draft.actions if isinstance(action, Admit) and action.request.table is table]
        for action in admitted:
            self._account_of_slot[action.request.slot] = self._account(action.request).number
            if blocks is not None:
                blocks.begin(action.request.slot)
        rows, starts = plan.rows, plan.num_computed
        accounts = self._account_of_slot[rows]
        # Decodes alone are most steps, and each operation on an array counts.
        is_decode = None if plan.is_continued else (plan.num_tokens == 1) & (starts > 0)
        chunks = None
        if blocks is not None:
            chunks = self._note_blocks(blocks, plan, is_decode, accounts)
            for action in admitted:
                self._join(blocks, action)
        recomputed = None
        if step.recomputed_tokens:
            recomputed = np.maximum(np.minimum(table.reached[rows], plan.ends) - starts, 0)
        saved_reads = self._scheduler.kv.saved_reads(rows if is_decode is None else rows[is_decode])
        return PlannedCharges(accounts, is_decode, saved_reads, chunks, recomputed)

    def _note_blocks(
        self, blocks: BlockCosts, plan: StepPlan, is_decode: BoolArray | None, accounts: IntArray
    ) -> PrefillBlocks | None:
        table, rows, starts = self._scheduler.queues.table.blocks, plan.rows, plan.num_computed
        begins_block = starts % table.block_size == 0
        if is_decode is not None:
            begins_block &= is_decode
        (begin,) = begins_block.nonzero()
        if len(begin):
            blocks.forget(table.ids[rows[begin], starts[begin] // table.block_size])
        if is_decode is None:
            return None
        parts = (~is_decode).nonzero()[0]
        if not len(parts):
            return None
        payers = self._named(accounts[parts])
        return blocks.chunks(parts, rows[parts], starts[parts], plan.num_tokens[parts], table.ids, payers)

    def _join(self, blocks: BlockCosts, action: Admit) -> None:
        request, hit = action.request, action.hit
        account = self._account(request)
        if not request.num_preemptions:
            account.cached_tokens += hit.num_tokens
        ids = self._scheduler.queues.table.blocks.ids[request.slot]
        num_found = len(hit.block_ids)
        if hit.host_hashes:
            blocks.forget(ids[num_found : num_found + len(hit.host_hashes)])
        if num_found:
            # A request that was preempted has read the blocks that it had.
            had = request.num_reached_tokens // self._scheduler.kv.block_size
            blocks.join(account, ids[:num_found], min(had, num_found))

    def note(
        self, step: Step, planned: PlannedCharges, online_s: float, offline_s: float, *, is_aborted: bool = False
    ) -> dict[str, float]:
        """Charges a step that is done; returns the seconds of its offline work by share.

        Args:
            online_s, offline_s: measured time of its online and of its offline work.
            is_aborted: whether its tokens do not count.
        """
        plan, count = step.plan, len(self._numbered)
        weights = self._weights(plan, planned)
        sums: list[float] = np.bincount(planned.accounts, weights, count).tolist()
        prices = self._price(sums, online_s, offline_s)
        if planned.is_decode is None:
            tokens = decodes = np.bincount(planned.accounts, minlength=count).tolist()
        else:
            decodes = np.bincount(planned.accounts, planned.is_decode, count).astype(np.int64).tolist()
            tokens = np.bincount(planned.accounts, plan.num_tokens, count).astype(np.int64).tolist()
        of_shares: dict[str, float] = {}
        for account, weight, num_decodes, num_tokens in zip(self._numbered, sums, decodes, tokens, strict=True):
            if account is None or not num_tokens:
                continue
            whole_s = weight * prices[account.work == CHATS]
            account.device_s += whole_s
            account.computed_s += whole_s
            if account.work != CHATS:
                of_shares[account.share] = of_shares.get(account.share, 0.0) + whole_s
            if not is_aborted:
                account.decode_tokens += num_decodes
                account.computed_tokens += num_tokens - num_decodes
                account.prefill_tokens += num_tokens - num_decodes
        if not is_aborted:
            self._note_again(plan, planned)
            if planned.chunks is not None and self._blocks is not None:
                parts = planned.chunks.parts
                of_parts = np.where(step.is_online[parts], prices[True], prices[False])
                token_s = weights[parts] * of_parts / plan.num_tokens[parts]
                self._blocks.computed(planned.chunks, self._named(planned.accounts[parts]), token_s)
        for request_id in step.preempted.request_ids:
            row = RowId.parse(request_id)
            if row is not None and (batch := self._of_batch.get(row.batch_id)) is not None:
                batch.num_preemptions += 1
        return of_shares

    def _price(self, weights: list[float], online_s: float, offline_s: float) -> tuple[float, float]:
        """Seconds of offline and of online work for each unit of weight.

        Args:
            weights: [accounts]
        """
        accounts = zip(self._numbered, weights, strict=True)
        of_online = sum(weight for account, weight in accounts if account is not None and account.work == CHATS)
        of_offline = sum(weights) - of_online
        if not of_online or not of_offline:
            price = (online_s + offline_s) / (of_online + of_offline)
            return price, price
        return offline_s / of_offline, online_s / of_online

    def _note_again(self, plan: StepPlan, planned: PlannedCharges) -> None:
        if planned.recomputed is not None:
            again = np.bincount(planned.accounts, planned.recomputed, len(self._numbered)).tolist()
            for account, num_tokens in zip(self._numbered, again, strict=True):
                if account is not None:
                    account.recomputed_tokens += int(num_tokens)

    # ---- prices ----

    def _weights(self, plan: StepPlan, planned: PlannedCharges) -> FloatArray:
        """[parts] seconds that each part would add to a full step."""
        if self._prices is None or self._num_priced >= PRICE_STEPS:
            self._prices, self._num_priced = token_prices(self._scheduler), 0
        self._num_priced += 1
        prices, context = self._prices, plan.num_computed
        weights: FloatArray = context.astype(np.float64)
        weights *= prices.kv_s
        weights += prices.decode_s + prices.kv_s
        if planned.saved_reads is not None:
            weights[... if planned.is_decode is None else planned.is_decode] -= prices.kv_s * planned.saved_reads
        if planned.is_decode is not None:
            chunks = ~planned.is_decode
            num_tokens, before = plan.num_tokens[chunks], context[chunks]
            pairs = num_tokens * (before + (num_tokens + 1) / 2)
            weights[chunks] = prices.prefill_s * num_tokens + prices.pair_s * pairs + prices.kv_s * before
        return weights

    # ---- accounts ----

    def _named(self, numbers: IntArray) -> list[CostAccount]:
        numbered = self._numbered
        return [account for number in numbers.tolist() if (account := numbered[number]) is not None]

    def _account(self, request: Request) -> CostAccount:
        batch_id = ""
        if request.is_online:
            work = CHATS
        elif request.tier is Tier.BATCH and (row := RowId.parse(request.request_id)) is not None:
            work, batch_id = BATCH, row.batch_id
        else:
            work = FLEX
        key = (request.share, work, batch_id)
        account = self._accounts.get(key)
        if account is None:
            if not self._free:
                self._free.append(len(self._numbered))
                self._numbered.append(None)
            number = self._free.pop()
            account = self._accounts[key] = self._numbered[number] = CostAccount(*key, number)
            if batch_id:
                self._of_batch[batch_id] = account
        return account

    def take(self, in_flight: Collection[PlannedCharges]) -> list[DeviceCharge]:
        """Changes of all accounts since the last call. Batches whose lines have ended are settled.

        Args:
            in_flight: steps that are planned and not done.
        """
        jobs = self._scheduler.queues.pool.jobs
        charges: list[DeviceCharge] = []
        for key, account in list(self._accounts.items()):
            if account.has_changed:
                charges.append(
                    DeviceCharge(
                        account.share,
                        account.work,
                        account.batch_id,
                        account.device_s,
                        account.computed_s,
                        account.prefill_tokens,
                        account.computed_tokens,
                        account.decode_tokens,
                        account.recomputed_tokens,
                        account.cached_tokens,
                        account.num_preemptions,
                    )
                )
                account.reset()
            if account.batch_id and account.batch_id not in jobs:
                account.is_open = False
                if not any((step.accounts == account.number).any() for step in in_flight):
                    del self._accounts[key], self._of_batch[account.batch_id]
                    self._numbered[account.number] = None
                    self._free.append(account.number)
        return charges


def token_prices(scheduler: Scheduler) -> TokenPrices:
    """Prices by the cost model as it is: differences to a full step of prompts and decodes."""
    predict, full = scheduler.cost_model.predict, max(scheduler.config.max_num_batched_tokens, 2)
    half, pairs = full // 2, full * full

    def seconds(prefill: int = full, decodes: int = 1, pairs: int = 0, kv_tokens: int = 0) -> float:
        return predict(
            BatchShape(
                prefill_tokens=prefill,
                prefill_requests=1,
                decode_requests=decodes,
                prefill_attention_pairs=pairs,
                decode_context_tokens=kv_tokens,
            )
        ).seconds

    whole_s = seconds()
    prices = TokenPrices(
        (whole_s - seconds(prefill=half)) / (full - half),
        (seconds(decodes=1 + half) - whole_s) / half,
        (seconds(pairs=pairs) - whole_s) / pairs,
        (seconds(kv_tokens=pairs) - whole_s) / pairs,
    )
    if prices.prefill_s <= 0.0 or prices.decode_s <= 0.0:  # The model does not tell tokens apart.
        return TokenPrices(1.0, 1.0, 0.0, 0.0)
    return TokenPrices(*(max(price, LEAST_PRICE_S) for price in prices))

"""Translates step plans into vLLM's scheduler output, and tracks the runner's state.

The runner keeps its requests' tokens and block tables, and receives only changes. A request is sent again if its slot's
epoch has changed or its output length differs from the runner's. vLLM's runners V1 and V2 differ: V1 gets a known
request's whole table again. V2 forgets the request and gets it as a new one with its tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from neaptide.engine.arrays import IntArray
from neaptide.engine.steps.plan import NewRequest, StepPlan
from neaptide.engine.table import RequestTable
from neaptide.executors.vllm.runner_state import CachedRequest, RunnerRows, RunnerState, runner_blocks


@dataclass(slots=True)
class RunnerKind:
    """Facts that a translation depends on besides the plan."""

    is_v2: bool
    is_async: bool
    """Whether a step may begin before the previous one is done."""
    vocab_size: int


class Translator:
    """Tracks the runner's state and translates plans.

    Args:
        to_params: makes vLLM's sampling parameters of a request.
    """

    def __init__(self, kind: RunnerKind, to_params: Callable[[NewRequest], Any]) -> None:
        self._kind = kind
        self._to_params = to_params
        self.told: dict[str, RunnerState] = {}
        """Requests that have not ended."""
        self.seeded: set[str] = set()
        """Those with a seed."""
        self.scored: set[str] = set()
        """Those whose prompts are scored."""
        self._finished: set[str] = set()
        """Ended requests that the runner has not been sent yet; ``_preempted`` likewise."""
        self._preempted: set[str] = set()
        self.invalid: set[str] = set()
        """Requests with a token id outside the vocabulary. The runner never receives them."""
        self._rows = RunnerRows(RequestTable(0, 1, 1))
        self._num_orders = 0
        self._counts: tuple[list[str], bytes, dict[str, int]] = [], b"", {}
        """The last scheduler output's request ids, their token counts as bytes, and both as a dict."""
        self._last: Any = None
        """The last scheduler output; None if the runner may not have received it."""
        self._before_last: Any = None
        """The one before the last, whose step may still be in flight."""

    def heed(self, plan: StepPlan) -> None:
        """Handles the plan's ended, preempted and new requests."""
        for request_id in plan.finished_ids:
            self._forget(request_id)
        for request_id in plan.preempted_ids:
            told = self.told.get(request_id)
            if told is not None and told.is_sent:
                self._must_resend(told)
        for new in plan.new_requests:
            self._forget(new.request_id)  # the same request may be submitted again
            told = self.told[new.request_id] = RunnerState(new, self._to_params(new))
            if self._has_bad_token(new.prompt_token_ids):
                self.invalid.add(new.request_id)
            if told.params.seed is not None:
                self.seeded.add(new.request_id)
            if new.params.prompt_logprobs is not None:
                self.scored.add(new.request_id)

    def order(self, plan: StepPlan) -> Any:
        """The ``SchedulerOutput`` for the plan's parts, without invalid ones."""
        order = SchedulerOutput.make_empty()
        cached = order.scheduled_cached_reqs
        order.num_scheduled_tokens = self._counted(plan)
        order.total_num_scheduled_tokens = plan.shape.num_tokens
        if plan.table is not self._rows.table:
            for told in self.told.values():
                self._rows.update(told)
            self._rows = RunnerRows(plan.table)
        going_on = self._rows.compare(plan, self._must_have_run())
        self._go_on(cached, plan, going_on)
        refused = [] if going_on.which is None else self._tell_of(order, plan, np.flatnonzero(~going_on.which))
        self._num_orders += 1
        self._rows.note(plan, self._num_orders)
        if refused:  # with a step in flight, their next parts are planned before their error is known
            self._rows.forget(plan.rows[refused])
        order.finished_req_ids, self._finished = self._finished, set()
        order.preempted_req_ids, self._preempted = self._preempted, set()
        self._before_last, self._last = self._last, order
        return order

    def _counted(self, plan: StepPlan) -> dict[str, int]:
        """Token counts of the parts. Most steps only decode, so they usually equal the previous step's."""
        ids, num_tokens, counts = self._counts
        if plan.request_ids != ids or plan.num_tokens.tobytes() != num_tokens:
            counts = dict(zip(plan.request_ids, plan.num_tokens.tolist(), strict=True))
            self._counts = plan.request_ids, plan.num_tokens.tobytes(), counts
        return counts.copy()

    def _go_on(self, cached: CachedRequestData, plan: StepPlan, going_on: CachedRequest) -> None:
        """Adds the parts that continue, with their new blocks."""
        which, grown = going_on.which, going_on.grown
        blocks: list[Any] = [None] * len(plan)
        if len(grown):
            new_blocks = self._rows.new_blocks(plan.rows.take(grown), going_on.num_told)
            for i, ids in zip(grown.tolist(), new_blocks, strict=True):
                blocks[i] = (ids,)
        if which is None:
            cached.req_ids += plan.request_ids
            cached.new_block_ids = blocks
            cached.num_computed_tokens += plan.num_computed.tolist()
            cached.num_output_tokens += plan.output_position.tolist()
        else:
            chosen = which.tolist()
            cached.req_ids += compress(plan.request_ids, chosen)
            cached.new_block_ids += compress(blocks, chosen)
            cached.num_computed_tokens += plan.num_computed[which].tolist()
            cached.num_output_tokens += plan.output_position[which].tolist()

    def _tell_of(self, order: Any, plan: StepPlan, parts: IntArray) -> list[int]:
        """Adds these parts one by one. Returns those that the runner must not receive."""
        ids, again = plan.request_ids, set(plan.resumed_ids)
        refused = []
        for i in parts.tolist():
            if ids[i] in self.invalid:
                order.total_num_scheduled_tokens -= order.num_scheduled_tokens.pop(ids[i])
                refused.append(i)
            else:
                self._tell(order, plan, i, ids[i] in again)
        return refused

    def _tell(self, order: Any, plan: StepPlan, i: int, is_resumed: bool) -> None:
        """Adds one part that does not simply continue."""
        cached, table, row = order.scheduled_cached_reqs, plan.table, int(plan.rows[i])
        start, num_output = int(plan.num_computed[i]), int(plan.output_position[i])
        epoch, held = int(table.epoch[row]), int(table.blocks.num_blocks[row])
        request_id = plan.request_ids[i]
        told = self.told[request_id]
        self._rows.update(told)
        if told.is_sent and (is_resumed or not self._agrees(told, epoch, start, num_output)):
            self._must_resend(told)
        if told.is_sent:
            blocks = None
            if told.must_resend:
                blocks = (runner_blocks(table, row, 0, held),)
                cached.resumed_req_ids.add(request_id)
            elif held != told.num_blocks:
                blocks = (runner_blocks(table, row, told.num_blocks, held),)
            self._add_cached(cached, request_id, blocks, start, num_output)
            if self._kind.is_async and num_output and (told.must_resend or not self._took_part(request_id)):
                cached.all_token_ids[request_id] = _known(table, row)
        else:
            order.scheduled_new_reqs.append(self._new_data(told, table, row, held, start, num_output))
        told.is_sent, told.must_resend = True, False
        told.row, told.epoch, told.num_blocks, told.num_output = row, epoch, held, num_output + int(plan.sample[i])
        told.order, told.end = self._num_orders + 1, start + int(plan.num_tokens[i])

    def _must_have_run(self) -> int | None:
        """The scheduler output that a part must have been in to continue without changes; None for any."""
        return self._num_orders if self._kind.is_async and not self._kind.is_v2 else None

    def invalidate(self, plan: StepPlan) -> None:
        """Invalidates the runner's state after a failed step: how much of it the runner applied is unknown.

        Everything that was sent may be sent again.
        """
        for order in (self._before_last, self._last):
            if order is not None:
                # Not for requests that have been sent since: the runner would lose them.
                self._finished |= {name for name in order.finished_req_ids if not self._is_sent(name)}
                self._preempted |= {name for name in order.preempted_req_ids if not self._is_sent(name)}
        self._before_last = self._last = None
        new = {request.request_id for request in plan.new_requests}
        if plan.table is self._rows.table:
            self._rows.forget(plan.rows)
        for request_id in plan.request_ids:
            told = self.told.get(request_id)
            if told is None or not told.is_sent:
                continue
            if request_id in new:
                told.is_sent = False
                self._finished.add(request_id)
            else:
                self._must_resend(told)

    def _is_sent(self, request_id: str) -> bool:
        told = self.told.get(request_id)
        return told is not None and told.is_sent

    def _took_part(self, request_id: str) -> bool:
        """Whether the request was scheduled in the last step."""
        return self._last is not None and request_id in self._last.num_scheduled_tokens

    def _agrees(self, told: RunnerState, epoch: int, start: int, num_output: int) -> bool:
        """Whether the runner's tokens, blocks and progress match the slot, or will after this output."""
        if told.must_resend or told.epoch != epoch:
            return False
        if start == told.end and num_output == told.num_output:
            return True
        # A step was undone. V2 counts its computed tokens itself. V1 follows our position and drops surplus tokens. But
        # a token that it samples in the previous output, still unknown to it, would be taken for the part's last token.
        return not self._kind.is_v2 and num_output <= told.num_output and told.order != self._must_have_run()

    def _must_resend(self, told: RunnerState) -> None:
        self._rows.drop(told)
        if self._kind.is_v2:
            told.is_sent = False
            self._preempted.add(told.new.request_id)
        else:
            told.must_resend = True

    def _forget(self, request_id: str) -> None:
        told = self.told.pop(request_id, None)
        self.seeded.discard(request_id)
        self.scored.discard(request_id)
        self.invalid.discard(request_id)
        if told is not None and told.is_sent:
            self._rows.drop(told)
            self._finished.add(request_id)

    def _has_bad_token(self, token_ids: list[int]) -> bool:
        return not (min(token_ids) >= 0 and max(token_ids) < self._kind.vocab_size)

    def _new_data(
        self, told: RunnerState, table: RequestTable, row: int, num_blocks: int, start: int, num_output: int
    ) -> Any:
        data = NewRequestData(
            req_id=told.new.request_id,
            prompt_token_ids=told.new.prompt_token_ids,
            mm_features=[],
            sampling_params=told.params,
            pooling_params=None,
            block_ids=(runner_blocks(table, row, 0, num_blocks),),
            num_computed_tokens=start,
            lora_request=None,
        )
        if self._kind.is_v2:
            data.prefill_token_ids = _known(table, row) if num_output else told.new.prompt_token_ids
        return data

    @staticmethod
    def _add_cached(cached: CachedRequestData, request_id: str, blocks: Any, start: int, num_output: int) -> None:
        cached.req_ids.append(request_id)
        cached.new_block_ids.append(blocks)
        cached.num_computed_tokens.append(start)
        cached.num_output_tokens.append(num_output)


def _known(table: RequestTable, row: int) -> list[int]:
    tokens: list[int] = table.tokens[row, : table.known[row]].tolist()
    return tokens

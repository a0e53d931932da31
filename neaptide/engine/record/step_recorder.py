"""Writes the step log while the engine runs."""

import logging
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec
import numpy as np

from neaptide.engine.config import EngineConfig
from neaptide.engine.kv.prefix_index import extend_block_hashes
from neaptide.engine.messages import (
    AbortRequest,
    AddBatch,
    AddRequest,
    CancelBatch,
    PlanReady,
    SetOffline,
    SetShareWeights,
    ToEngine,
)
from neaptide.engine.observer import EngineObserver
from neaptide.engine.offline.planned import PlannedOrder
from neaptide.engine.offline.prefix_tree import PrefixTree
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.params import FinishReason
from neaptide.engine.record.block_numbers import BlockNumbers, Ranges
from neaptide.engine.record.harmless import harmless
from neaptide.engine.record.row_orders import RowOrders
from neaptide.engine.record.step_log import (
    VERSION,
    AbortLine,
    AddLine,
    BatchLine,
    CancelLine,
    HeaderLine,
    IdleLine,
    Line,
    ObserveLine,
    OfflineLine,
    OrderLine,
    PlanLine,
    RowLine,
    StepLine,
    WeightsLine,
)
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId, is_row_of
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.policies import policy_of
from neaptide.engine.steps.plan import BatchShape, StepResult
from neaptide.engine.steps.step import Step

logger = logging.getLogger(__name__)

NO_HANDLE = -1
IDLE_S = 1.0
"""Longest time without an idle line while the engine is idle."""


@dataclass(slots=True)
class _Files:
    """Token files of a batch, by their paths, and the number of its open lines."""

    numbers: dict[str, int] = field(default_factory=dict)
    num_open_rows: int = 0


class StepRecorder(EngineObserver):
    """Writes the step log of one engine. No method raises: an I/O error or a bug here ends the log only.

    Args:
        out: closed by ``close``.
        recipe: how ``replay`` makes the cost model and the headroom predictor again.
    """

    def __init__(self, out: IO[bytes], config: EngineConfig, num_blocks: int, recipe: dict[str, Any]) -> None:
        self._out = out
        self._encode = msgspec.json.Encoder().encode
        self.failed = False
        """Whether the log ended before its engine."""
        self._block_size = config.cache.block_size
        self._numbers = BlockNumbers()
        self._num_handles = 0
        self._rows: dict[str, dict[int, int]] = {}
        """Handles of the lines that are not requests yet, by batch and line."""
        self._live: dict[str, tuple[int, list[bytes]]] = {}
        """Handle and hashes of the full blocks of every other open request, by its id."""
        self._running: set[int] = set()
        self._one_token: set[int] = set()
        self._ended: list[tuple[int, int, int, Ranges]] = []
        self._ended_ids: dict[str, int] = {}
        """Handles of requests that ended since the last step was written. That step's plan may still name them."""
        self._ended_before: dict[str, int] = {}
        """Handles of requests that ended one step earlier. The plan and result of a step in flight may name them."""
        self._idle: tuple[float, int] | None = None
        """Time of the last idle line, and the number of preemptions since the last step. None if another line follows
        it."""
        policy = policy_of(config.scheduler)
        self._overlaps = config.scheduler.overlap_depth > 0
        self._planning_s = 0.0
        """When the last planning began."""
        self._num_in_flight = 0
        self._next_plan_s: list[float] = []
        """Times of a planning while a step was in flight; see ``StepLine.next``."""
        self._orders = None if policy.row_key is None else RowOrders(policy.row_key)
        self._follows_prefixes = policy.follows_prefixes
        self._files: dict[str, _Files] = {}
        """Token files of each batch with open lines."""
        self._num_files = 0
        cache = config.cache
        self._header(
            HeaderLine(
                VERSION,
                config.scheduler,
                self._block_size,
                cache.enable_prefix_cache,
                num_blocks,
                recipe,
                cache.num_host_blocks,
                cache.slot_copies,
                cache.shared_reads,
            )
        )

    @property
    def num_open(self) -> int:
        """Number of entries kept for requests, lines, orders and files."""
        return len(self._live) + sum(map(len, self._rows.values())) + len(self._orders or ()) + len(self._files)

    @harmless
    def warmed_up(self, shape: BatchShape, seconds: float) -> None:
        fields = [getattr(shape, name) for name in BatchShape.__slots__]
        self._write(ObserveLine(fields, seconds))

    @harmless
    def message(self, message: ToEngine, now_s: float) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, AddBatch):
            self._add_batch(message, now_s)
        elif isinstance(message, AbortRequest):
            self._write(AbortLine(message.request_ids, message.reason, now_s))
        elif isinstance(message, CancelBatch):
            self._write(CancelLine(message.batch_id))
        elif isinstance(message, PlanReady):
            self._order(PlannedOrder.of(message))
        elif isinstance(message, SetOffline):
            self._write(OfflineLine(message.paused))
        elif isinstance(message, SetShareWeights):
            self._write(WeightsLine(message.weights))

    @harmless
    def row(self, request: Request) -> None:
        row_id = RowId.parse(request.request_id)
        assert row_id is not None
        handle = self._take_unseen(row_id)
        assert handle is not None
        # The prefix cache needs the same hashes, so they are stored in the request.
        extend_block_hashes(request.block_hashes, request.prompt_token_ids, self._block_size, request.salt)
        self._live[request.request_id] = handle, request.block_hashes
        if request.block_hashes:
            self._write(RowLine(handle, self._numbers.of(request.block_hashes)))

    @harmless
    def refused(self, request_id: str) -> None:
        row_id = RowId.parse(request_id)
        if self._live.pop(request_id, None) is None and row_id is not None and self._take_unseen(row_id) is not None:
            self._row_ended(request_id)

    @harmless
    def cancelled(self, batch_id: str) -> None:
        """Forgets the open lines of a cancelled batch."""
        self._rows.pop(batch_id, None)
        self._files.pop(batch_id, None)
        if self._orders is not None:
            self._orders.forget(batch_id)
        for request_id in [key for key in self._live if is_row_of(key, batch_id)]:
            del self._live[request_id]

    @harmless
    def planning(self, now_s: float) -> None:
        self._planning_s = now_s

    @harmless
    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        times_s = [step.timer.start_s, step.timer.scheduled_at_s]
        if self._num_in_flight:
            self._next_plan_s = times_s
        elif self._overlaps:
            self._write(PlanLine(times_s))
        self._num_in_flight += 1

    @harmless
    def undone(self, step: Step) -> None:
        self._num_in_flight -= 1

    @harmless
    def idle(self, start_s: float, scheduler: Scheduler) -> None:
        num_preempted = len(scheduler.preempted.request_ids)
        if self._idle is None or start_s >= self._idle[0] + IDLE_S or num_preempted != self._idle[1]:
            self._write(IdleLine(start_s))
            self._idle = start_s, num_preempted

    @harmless
    def ended(self, request: Request, reason: FinishReason) -> None:
        handle, _ = self._live.pop(request.request_id)
        extend_block_hashes(request.block_hashes, request.token_ids, self._block_size, request.salt)
        tail = request.block_hashes[request.num_prompt_tokens // self._block_size :]
        num_output_tokens = request.num_known_tokens - request.num_prompt_tokens
        self._ended.append((handle, num_output_tokens, reason, self._numbers.of(tail)))
        self._ended_ids[request.request_id] = handle
        self._row_ended(request.request_id)

    @harmless
    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        line = self._step_line(step, scheduler)
        line.errors = {str(self._handle(request_id)): error for request_id, error in result.errors.items()}
        named = [request_id for request_id in result.late if self._is_named(request_id)]
        line.late = {str(self._handle(request_id)): result.late[request_id] for request_id in named}
        if result.mask_s:
            line.mask_s = result.mask_s
        line.in_parts = not result.is_whole
        self._note_step(line, step, scheduler)

    @harmless
    def given_up(self, step: Step, scheduler: Scheduler) -> None:
        line = self._step_line(step, scheduler)
        line.given_up = True
        self._note_step(line, step, scheduler)

    def _step_line(self, step: Step, scheduler: Scheduler) -> StepLine:
        """The step's record without its results and requests."""
        plan, timer, blocks = step.plan, step.timer, scheduler.kv.occupancy()
        planning = [timer.start_s] if timer.scheduled_at_s == timer.start_s else [timer.start_s, timer.scheduled_at_s]
        return StepLine(
            step=plan.step,
            t=[*planning, timer.executed_at_s],
            predicted=[round(plan.predicted_s, 9), round(plan.margin_s, 9), round(plan.budget_s, 9)],
            kv=[blocks.cached, blocks.online, blocks.offline],
            preempt=[self._handle(request_id) for request_id in step.preempted.request_ids],
            end=self._ended,
        )

    def _note_step(self, line: StepLine, step: Step, scheduler: Scheduler) -> None:
        plan = step.plan
        if self._overlaps:
            line.next = self._next_plan_s or [self._planning_s]
        self._num_in_flight -= 1
        self._next_plan_s = []
        self._running.difference_update(line.preempt)
        one_token = []
        gone = {handle for handle, *_ in self._ended}
        parts = zip(plan.request_ids, plan.num_tokens.tolist(), plan.num_computed.tolist(), strict=True)
        for request_id, num_tokens, num_computed in parts:
            if not self._is_named(request_id):
                continue  # It ended with the step before, while this one was in flight.
            handle = self._handle(request_id)
            if handle not in self._running:
                self._running.add(handle)
                line.admit.append((handle, num_computed))
            if num_tokens == 1:
                one_token.append(handle)
            else:
                line.chunks.append((handle, num_tokens))
        now = set(one_token)
        line.join = [handle for handle in one_token if handle not in self._one_token]
        line.leave = sorted(self._one_token - now)
        self._one_token = now - gone
        self._running -= gone
        self._ended, self._ended_ids, self._ended_before = [], {}, self._ended_ids
        self._write(line)
        if self._numbers.is_full:
            # A block that is neither cached nor in a request can be found by no request.
            live = {block_hash for _, hashes in self._live.values() for block_hash in hashes}
            self._numbers.sweep(lambda h: h in live or scheduler.kv.is_indexed(h))

    def close(self) -> None:
        try:
            self._out.close()
        except Exception as error:
            if not self.failed:
                self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Ends the record."""
        logger.error("the step log cannot be written: %s", error, exc_info=not isinstance(error, OSError))
        self.failed = True
        self._numbers, self._rows, self._live, self._orders, self._files = BlockNumbers(), {}, {}, None, {}

    @harmless
    def _header(self, line: HeaderLine) -> None:
        self._write(line)

    def _add(self, message: AddRequest) -> None:
        handle = self._next_handles(1)
        hashes: list[bytes] = []
        extend_block_hashes(hashes, message.prompt_token_ids, self._block_size, message.salt)
        self._live[message.request_id] = handle, hashes
        self._write(
            AddLine(
                message.request_id,
                message.tier,
                message.arrival_s,
                message.ttft_slo_s,
                message.tpot_slo_s,
                message.params.max_tokens,
                len(message.prompt_token_ids),
                self._numbers.of(hashes),
                message.params.prompt_logprobs is not None,
                message.share,
            )
        )

    def _add_batch(self, message: AddBatch, now_s: float) -> None:
        """Writes the batch without reading prompts, as the engine's next step waits (a policy that sorts by text reads
        them)."""
        try:
            tokens = TokenFile(message.path)
        except (OSError, ValueError):
            return  # The engine refuses the batch as a whole, or retries it later.
        rows = message.rows
        if not rows or max(rows) >= len(tokens):
            return  # The engine refuses it as well.
        params = [message.params_table[index] for index in message.params_index]
        lengths = tokens.lengths(np.array(rows, np.int64)).tolist()
        limits = [own.max_tokens for own in params]
        line = BatchLine(message.batch_id, now_s, message.deadline_s, list(zip(rows, lengths, limits, strict=True)))
        line.scores_prompt = [row for row, own in zip(rows, params, strict=True) if own.prompt_logprobs is not None]
        first = self._next_handles(len(rows))
        line.share = message.share
        if self._follows_prefixes:
            self._name_file(line, message.path, len(tokens))
        if self._orders is not None:
            line.order, line.behind = self._orders.add(message.batch_id, tokens, rows, first)
        self._rows.setdefault(message.batch_id, {}).update(zip(rows, range(first, first + len(rows)), strict=True))
        self._write(line)

    def _order(self, order: PlannedOrder) -> None:
        handles = []
        for number, row in zip(order.batches.tolist(), order.rows.tolist(), strict=True):
            batch_id = order.batch_ids[number]
            handle = self._rows.get(batch_id, {}).get(row)
            if handle is None:
                handle, _ = self._live.get(str(RowId(batch_id, row)), (NO_HANDLE, []))
            handles.append(handle)
        line = OrderLine(handles)
        if (ends := order.ends) is not None:
            line.ends, line.densities = [ends.root_density, ends.token_s, ends.kv_token_s], ends.densities
            line.held_tokens, line.lasting_steps = (
                column.astype(int).tolist() for column in (ends.held_tokens, ends.lasting_steps)
            )
            line.memory_s, line.turns = ends.window_memory_s, ends.turns.tolist()
            line.starts, line.kv_tokens, line.first = ends.starts.tolist(), ends.kv_tokens, ends.num_first
            line.tile = ends.tile_tokens
        self._write(line)

    def _name_file(self, line: BatchLine, path: str, num_rows: int) -> None:
        files = self._files.setdefault(line.id, _Files())
        files.num_open_rows += len(line.rows)
        if path not in files.numbers:
            self._num_files += 1
            files.numbers[path] = self._num_files
            tree = PrefixTree.load(path, num_rows)
            if len(tree.parent):
                line.prefixes = {name: column.tolist() for name, column in tree.arrays.items()}
        line.file = files.numbers[path]

    def _next_handles(self, count: int) -> int:
        """The first of ``count`` new handles."""
        self._num_handles += count
        return self._num_handles - count

    def _take_unseen(self, row_id: RowId) -> int | None:
        """Handle of a line that is not a request yet."""
        rows = self._rows.get(row_id.batch_id, {})
        handle = rows.pop(row_id.row, None)
        if handle is not None and not rows:
            del self._rows[row_id.batch_id]
        return handle

    def _row_ended(self, request_id: str) -> None:
        if (row_id := RowId.parse(request_id)) is None:
            return
        if self._orders is not None:
            self._orders.row_ended(row_id.batch_id)
        if (files := self._files.get(row_id.batch_id)) is not None:
            files.num_open_rows -= 1
            if not files.num_open_rows:
                del self._files[row_id.batch_id]

    def _is_named(self, request_id: str) -> bool:
        return request_id in self._live or request_id in self._ended_ids

    def _handle(self, request_id: str) -> int:
        named = self._live.get(request_id)
        if named is not None:
            return named[0]
        return self._ended_ids[request_id] if request_id in self._ended_ids else self._ended_before[request_id]

    def _write(self, line: Line) -> None:
        self._out.write(self._encode(line) + b"\n")
        self._idle = None

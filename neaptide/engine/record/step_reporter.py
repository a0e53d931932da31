"""Reports the steps of a running engine with what each held (``messages.RecentSteps``)."""

import logging
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import BoolArray, IntArray
from neaptide.engine.messages import AddRequest, HeldStep, RecentSteps, ToEngine
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import RequestClass, request_class
from neaptide.engine.record.charges import PlannedCharges, StepCharges
from neaptide.engine.record.harmless import harmless
from neaptide.engine.scheduler.actions import Admit
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape, StepPlan, StepResult
from neaptide.engine.steps.step import Step

logger = logging.getLogger(__name__)


class _PlannedStep(NamedTuple):
    """State when a step was planned, which later steps change."""

    admissions: IntArray
    """[parts] admission number of each part's request."""
    charges: PlannedCharges
    admitted: list[tuple[int, str]]
    waiting_online: int
    free_slots: int
    available_blocks: int


class StepReporter(EngineObserver):
    """Collects steps, and gives them to the engine's loop. A step takes 50 µs with one request and 130 µs
    with 64, its charges included."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.failed = False
        self._planned: deque[_PlannedStep] = deque()
        """Planned state of the steps that are not done, in order."""
        self._undone: list[tuple[int, str]] = []
        """Admissions of a step that was undone; its requests stay admitted."""
        self._steps: list[HeldStep] = []
        self._taken: list[tuple[str, float, int]] = []
        self._told_s: float | None = None
        """When the last report was made."""
        self._online_s = 0.0
        self._offline_s: defaultdict[str, float] = defaultdict(float)
        self._charges = StepCharges(scheduler)

    # ---- events ----

    @harmless
    def message(self, message: ToEngine, now_s: float) -> None:
        if isinstance(message, AddRequest) and request_class(message.tier) is RequestClass.ONLINE:
            self._taken.append((message.request_id, now_s, len(message.prompt_token_ids)))

    @harmless
    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        queues, rows = scheduler.queues, step.plan.rows
        admitted, self._undone = self._undone, []
        for action in draft.actions:
            if isinstance(action, Admit):
                request = action.request
                if request.is_online:
                    admitted.append((request.admission_index, request.request_id))
        self._planned.append(
            _PlannedStep(
                queues.table.admission[rows],
                self._charges.planned(step, draft),
                admitted,
                len(queues.waiting_online),
                scheduler.config.max_num_seqs - queues.num_running,
                scheduler.kv.available,
            )
        )

    @harmless
    def undone(self, step: Step) -> None:
        self._undone += self._planned.pop().admitted

    @harmless
    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        self._note(step, result.mask_s, scheduler)

    @harmless
    def given_up(self, step: Step, scheduler: Scheduler) -> None:
        self._note(step, 0.0, scheduler, is_aborted=True)

    def give_up(self, error: Exception) -> None:
        logger.error("the record of recent steps has failed; late chats are not explained any more", exc_info=error)
        self.failed = True
        self._steps, self._taken = [], []

    # ---- reports ----

    def take(self, now_s: float) -> RecentSteps | None:
        """Report of the time since the last one; None if nothing has happened."""
        scheduler = self._scheduler
        # Paused time counts without a step too: batches wait for its end.
        if self.failed or not (self._steps or self._taken or scheduler.offline_paused):
            return None
        last_s, self._told_s = self._told_s, now_s
        report = RecentSteps(
            now_s,
            scheduler.kv.block_size,
            self._steps,
            self._taken,
            self._online_s,
            dict(self._offline_s),
            scheduler.offline_paused,
            0.0 if last_s is None else now_s - last_s,
            self._charges.take([step.charges for step in self._planned]),
        )
        self._steps, self._taken, self._online_s = [], [], 0.0
        self._offline_s.clear()
        return report

    def _note(self, step: Step, mask_s: float, scheduler: Scheduler, *, is_aborted: bool = False) -> None:
        plan, timer, planned = step.plan, step.timer, self._planned.popleft()
        online, blocks = step.is_online, scheduler.kv.occupancy()
        is_decode = (plan.num_tokens == 1) & (plan.num_computed > 0)
        streams, prompts = online & is_decode, (online & ~is_decode).nonzero()[0]
        chunks = list(
            zip(
                planned.admissions[prompts].tolist(),
                plan.num_tokens[prompts].tolist(),
                plan.num_computed[prompts].tolist(),
                strict=True,
            )
        )
        num_decodes = int(np.count_nonzero(streams))
        offline_decodes = plan.shape.decode_requests - num_decodes
        online_tokens = num_decodes + sum(num_tokens for _, num_tokens, _ in chunks)
        offline_tokens = plan.shape.num_tokens - online_tokens
        online_s, streams_s = self._predicted_s(plan, streams, chunks, has_offline=offline_tokens > 0)
        share = online_s / plan.predicted_s if plan.predicted_s > 0 else float(online_tokens > 0)
        online_share_s = share * timer.execute_s if offline_tokens else timer.execute_s
        self._online_s += online_share_s
        offline_s = timer.execute_s - online_share_s
        of_shares = self._charges.note(step, planned.charges, online_share_s, offline_s, is_aborted=is_aborted)
        for name, seconds in of_shares.items():
            self._offline_s[name] += seconds
        self._steps.append(
            HeldStep(
                step=plan.step,
                start_s=timer.start_s,
                end_s=timer.executed_at_s,
                busy_s=timer.execute_s,
                mask_s=mask_s,
                predicted_s=plan.predicted_s,
                margin_s=plan.margin_s,
                online_s=online_s,
                streams_s=streams_s,
                streams=planned.admissions[streams].astype(np.int32).tobytes(),
                chunks=chunks,
                offline_prefill_tokens=offline_tokens - offline_decodes,
                offline_decode_tokens=offline_decodes,
                waiting_online=planned.waiting_online,
                free_slots=planned.free_slots,
                available_blocks=planned.available_blocks,
                online_blocks=blocks.online,
                offline_blocks=blocks.offline,
                reserved_blocks=scheduler.headroom.headroom_blocks(timer.end_s),
                is_aborted=is_aborted,
                admitted=planned.admitted,
                preempted=list(step.preempted.request_ids),
                offline_limit=step.draft.offline_ended_by or "",
                lengths=[(one.kind, one.length_s, one.num_late, one.term) for one in step.draft.chosen],
            )
        )

    def _predicted_s(
        self, plan: StepPlan, streams: BoolArray, chunks: list[tuple[int, int, int]], *, has_offline: bool
    ) -> tuple[float, float]:
        """Predicted time of the step without its offline work, and of its online decodes alone.

        The cost model has learned from the step since it was planned, so the shares of two predictions of now are
        applied to the prediction of then.
        """
        num_streams = int(np.count_nonzero(streams))
        if not has_offline and (not chunks or not num_streams):
            return plan.predicted_s, plan.predicted_s if num_streams else 0.0
        shape, predict = BatchShape(), self._scheduler.cost_model.predict
        whole_s, streams_s = predict(plan.shape).seconds, 0.0
        if whole_s <= 0:
            return plan.predicted_s, 0.0
        if num_streams:
            contexts = plan.num_computed[streams]
            context_tokens = int(contexts.sum()) + num_streams
            shared = plan.shape.shared_prefix_tokens * context_tokens // max(plan.shape.decode_context_tokens, 1)
            shape.add_decodes(num_streams, context_tokens, int(contexts.max()) + 1, shared)
            streams_s = predict(shape).seconds
        for _, num_tokens, context in chunks:
            shape.add(num_tokens, context)
        online_s = whole_s if not has_offline else predict(shape).seconds if shape.num_tokens else 0.0
        online_s = min(online_s, whole_s)
        factor = plan.predicted_s / whole_s
        return factor * online_s, factor * min(streams_s, online_s)

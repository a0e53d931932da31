"""Records the traffic of a running engine (``traffic``)."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from neaptide.engine.interfaces import CostModel
from neaptide.engine.messages import SetOffline, TellTraffic, ToEngine, Traffic
from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason
from neaptide.engine.record.harmless import harmless
from neaptide.engine.record.traffic import (
    ERROR_UNIT,
    MAX_ERROR,
    NAME_BYTES,
    Present,
    ServedRequest,
    TrafficPiece,
    WaitingRows,
    traffic_encoder,
)
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step

logger = logging.getLogger(__name__)

Costs = tuple[dict[str, Any], CostModel]
PIECE_S = 2.0
COSTS_S = 10.0
"""Time between two recipes. Step times drift slowly, and a recipe is most of a piece."""
MAX_BETWEEN_S = 0.005
"""Longest host time counted between two steps; a longer gap was a wait for work."""


class TrafficRecorder(EngineObserver):
    """Collects traffic, and gives a piece to the engine's loop now and then. Takes a few microseconds per step and
    request.

    Args:
        scheduler: of the engine that it observes.
        num_blocks: KV blocks of that engine.
        costs: current step times, as a recipe and as the frozen model that it describes.
    """

    def __init__(self, scheduler: Scheduler, num_blocks: int, costs: Callable[[], Costs]) -> None:
        self._scheduler = scheduler
        self._num_blocks = num_blocks
        self._costs = costs
        self._told: CostModel | None = None
        """Model of the recipe that was sent last."""
        self.failed = False
        self._now_s = 0.0
        """Time of the last message or the end of the last step."""
        self._ended: list[ServedRequest] = []
        self._ended_tokens = 0
        """Logical tokens of ended offline requests since the start."""
        self._was_paused = False
        self._num_steps = 0
        self._host_s = self._measured_s = self._predicted_s = 0.0
        self._errors: Counter[int] = Counter()
        self._last_end_s = math.inf
        self._took_s = self._costs_at_s = -math.inf
        self._is_asked = False

    # ---- events ----

    @harmless
    def message(self, message: ToEngine, now_s: float) -> None:
        self._now_s = now_s
        if isinstance(message, TellTraffic):
            self._is_asked = True
        elif isinstance(message, SetOffline):
            self._was_paused |= message.paused

    @harmless
    def executed(self, step: Step, result: StepResult) -> None:
        self._now_s = step.timer.executed_at_s

    @harmless
    def ended(self, request: Request, reason: FinishReason) -> None:
        self._ended.append(_served(request, self._now_s, reason))
        if not request.is_online:
            # The end-of-sequence token was sampled as well, but is not stored.
            self._ended_tokens += _logical_tokens(request) + (reason is FinishReason.STOP)

    @harmless
    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        timer = step.timer
        between_s = min(max(timer.start_s - self._last_end_s, 0.0), MAX_BETWEEN_S)
        self._last_end_s = timer.end_s
        self._num_steps += 1
        self._host_s += between_s + timer.schedule_s + timer.commit_s
        if self._told is not None and timer.execute_s > 0 and result.is_whole:
            self._count_error(timer.execute_s, self._told.predict(step.plan.shape).seconds)

    def _count_error(self, measured_s: float, predicted_s: float) -> None:
        if predicted_s > 0:
            units = round(math.log(measured_s / predicted_s) / ERROR_UNIT)
            self._errors[min(max(units, -MAX_ERROR), MAX_ERROR)] += 1
            self._measured_s += measured_s
            self._predicted_s += predicted_s

    def give_up(self, error: Exception) -> None:
        logger.error("the traffic record has failed; no more traffic is recorded", exc_info=error)
        self.failed = True
        self._ended = []

    # ---- pieces ----

    def take(self, now_s: float) -> list[Traffic]:
        """A piece, if one is due and something has happened. If present requests were asked for, a second piece that
        has them."""
        is_due = now_s >= self._took_s + PIECE_S and (self._num_steps or self._ended)
        if self.failed or not (is_due or self._is_asked):
            return []
        try:
            found = [self._next(now_s)]
            if self._is_asked:
                piece = self._piece(now_s)
                piece.costs, piece.present = self._costs()[0], self._present()
                found.append(Traffic(traffic_encoder.encode(piece), True))
        except Exception as error:
            self.give_up(error)
            return []
        self._is_asked = False
        return found

    def _next(self, now_s: float) -> Traffic:
        """What has happened since the last piece."""
        piece = self._piece(now_s)
        if now_s >= self._costs_at_s + COSTS_S:
            self._costs_at_s, (piece.costs, self._told) = now_s, self._costs()
        self._took_s, self._was_paused = now_s, self._scheduler.offline_paused
        self._ended, self._num_steps, self._errors = [], 0, Counter()
        self._host_s = self._measured_s = self._predicted_s = 0.0
        return Traffic(traffic_encoder.encode(piece), False)

    def _piece(self, now_s: float) -> TrafficPiece:
        return TrafficPiece(
            now_s,
            self._ended,
            self._offline_tokens(),
            self._was_paused or self._scheduler.offline_paused,
            self._num_steps,
            self._host_s,
            dict(self._errors),
            self._measured_s,
            self._predicted_s,
        )

    def _offline_tokens(self) -> int:
        queues = self._scheduler.queues
        table = queues.table
        slots = np.flatnonzero(table.live & ~table.online)
        known, prompt = table.known[slots], table.prompt[slots]
        running = np.where(known > prompt, known, np.minimum(table.committed[slots], prompt))
        return self._ended_tokens + int(running.sum()) + sum(map(_logical_tokens, queues.pool.returned))

    def _present(self) -> Present:
        scheduler, queues = self._scheduler, self._scheduler.queues
        waiting = [
            WaitingRows(
                batch_id,
                delivery.tokens.stem,
                delivery.salt,
                delivery.arrival_s,
                delivery.deadline_s,
                *(column.astype(np.int32).tobytes() for column in delivery.left),
            )
            for batch_id, job in queues.pool.jobs.items()
            for delivery in job.sources
        ]
        requests = [*queues.running(), *queues.waiting_online, *queues.pool.returned, *queues.pool.flex]
        served = [_served(request, 0.0, None) for request in requests]
        kv = scheduler.kv
        return Present(scheduler.config, kv.block_size, self._num_blocks, served, waiting, kv.shared_reads)


def _served(request: Request, ended_s: float, reason: FinishReason | None) -> ServedRequest:
    return ServedRequest(
        request.request_id,
        request.tier,
        request.arrival_s,
        request.deadline_s,
        request.ttft_slo_s,
        request.tpot_slo_s,
        request.num_prompt_tokens,
        request.num_known_tokens - request.num_prompt_tokens,
        request.params.max_tokens,
        request.scheduled_s,
        request.first_token_s,
        ended_s,
        reason,
        b"".join([block_hash[:NAME_BYTES] for block_hash in request.block_hashes]),
    )


def _logical_tokens(request: Request) -> int:
    """Finished prompt tokens and output tokens. Prompt tokens that a preemption dropped are not counted."""
    known, prompt = request.num_known_tokens, request.num_prompt_tokens
    return known if known > prompt else min(request.num_committed_tokens, prompt)

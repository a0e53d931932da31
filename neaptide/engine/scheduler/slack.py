"""How long this step may take: the time budget that protects every online deadline."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from neaptide.engine.batch import BatchShape
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel
from neaptide.engine.request import Request

ITL_FACTOR = 1.5
"""Slack that a stream has banked may not be spent in one stall: a gap is at most this many TPOT targets."""
CUSHION_SHARE = 0.5
"""Of its TPOT target, the slack that a stream keeps after every step: one step that overruns, its last one above all,
must not make it late. It costs every stream half a token's time once, not a share of every step."""
MIN_IDLE_SHARE = 0.5
"""Of the TPOT target: the bound for requests that have not arrived yet never falls below it, because a machine too
slow for its TTFT target would otherwise never do offline work at all."""


def prefill_seconds(cost_model: CostModel, num_tokens: int, context_tokens: int) -> float:
    shape = BatchShape()
    shape.add(num_tokens, context_tokens)
    seconds, margin_s = cost_model.predict(shape)
    return seconds + margin_s


@dataclass(slots=True, frozen=True)
class StepBounds:
    """Upper bounds on the step's duration, in seconds; infinite where nothing asks for one."""

    itl_s: float
    """The gap that running online streams may see: nothing, online prompts included, may stall them longer."""
    slack_s: float
    """What running online streams can spare before their next token is due."""
    idle_s: float
    """For the online request that arrives in the middle of the step."""


class SlackTracker:
    """Derives the bounds from deadlines, the cost model, and the prompts that arrived lately."""

    RECENT_ARRIVALS = 100

    def __init__(self, config: SchedulerConfig, cost_model: CostModel) -> None:
        self._config = config
        self._cost_model = cost_model
        self._prompt_tokens: deque[int] = deque(maxlen=self.RECENT_ARRIVALS)
        self._min_ttft_slo_s = config.ttft_slo_s

    def observe_arrival(self, request: Request) -> None:
        self._prompt_tokens.append(request.num_prompt_tokens)
        self._min_ttft_slo_s = min(self._config.ttft_slo_s, request.ttft_slo_s)

    def bounds(self, now_s: float, running_online: Iterable[Request]) -> StepBounds:
        streams = [request for request in running_online if request.num_output_tokens]
        itl_s = slack_s = math.inf
        alone = BatchShape()
        for request in streams:
            alone.add(1, request.num_tokens - 1)
            itl_s = min(itl_s, ITL_FACTOR * request.tpot_slo_s)
            cushion_s = CUSHION_SHARE * request.tpot_slo_s
            slack_s = min(slack_s, request.next_deadline_s - cushion_s - self._config.egress_s - now_s)
        if streams and self._cost_model.predict(alone).seconds >= min(r.tpot_slo_s for r in streams):
            # Not even alone do these streams keep their pace: starving offline work would save nobody.
            slack_s = math.inf
        return StepBounds(itl_s, slack_s, self._idle_bound_s())

    def prefill_slack_s(self, now_s: float, unfinished: Iterable[Request]) -> float:
        """``min over i of (D_i - egress - t0 - W_i)``, W_i the prefill time left of i and of all before it.

        ``unfinished`` are online requests with prompt left after this step, in deadline order. One that can no
        longer make its deadline is relegated and asks for nothing.
        """
        slack_s, ahead_s = math.inf, 0.0
        for request in unfinished:
            ahead_s += prefill_seconds(self._cost_model, request.num_uncomputed_tokens, request.num_computed_tokens)
            own_slack_s = request.next_deadline_s - self._config.egress_s - now_s - ahead_s
            if own_slack_s > 0:
                slack_s = min(slack_s, own_slack_s)
        return slack_s

    def is_feasible(self, request: Request, now_s: float) -> bool:
        """Whether the first token can still be in time if its prefill starts now."""
        left_s = prefill_seconds(self._cost_model, request.num_uncomputed_tokens, request.num_computed_tokens)
        return now_s + left_s + self._config.egress_s <= request.next_deadline_s

    def _idle_bound_s(self) -> float:
        floor_s = MIN_IDLE_SHARE * self._config.tpot_slo_s
        prefill_s = 0.0
        if self._prompt_tokens:
            ordered = sorted(self._prompt_tokens)
            prefill_s = prefill_seconds(self._cost_model, ordered[int(0.9 * (len(ordered) - 1))], 0)
        bound_s = self._min_ttft_slo_s - prefill_s - self._config.egress_s
        return max(floor_s, bound_s / (1 + self._config.overlap_depth))

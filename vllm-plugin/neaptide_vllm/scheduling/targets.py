"""Default latency targets, derived from measured steps where the operator gives none."""

from neaptide.engine.interfaces import CostModel
from neaptide.engine.scheduler.traffic import RecentTraffic
from neaptide.engine.steps.plan import BatchShape
from neaptide_vllm.scheduling.cost import FITS_AT, LearnedCostModel
from neaptide_vllm.settings import Settings

FIRST_TTFT_S, FIRST_TPOT_S = 1.0, 0.1
"""Targets until enough steps are measured."""
OVER_ALONE = 2.4
"""TPOT target over the time of a step with the usual streams alone; TTFT over that of a usual prompt."""
TTFT_OVER_TPOT = 5.0
LEAST_TPOT_S = 0.02
"""No target is shorter: readers see no difference."""
USUAL_CONTEXT_TOKENS = 1024
UPDATE_STEPS = 500
"""Measured steps between two derivations."""


class DefaultTargets:
    """TTFT and TPOT targets of chats that name none."""

    def __init__(self, settings: Settings, cost_model: LearnedCostModel) -> None:
        self._settings, self._cost_model = settings, cost_model
        self.ttft_slo_s = settings.ttft_ms / 1e3 if settings.ttft_ms else FIRST_TTFT_S
        self.tpot_slo_s = settings.tpot_ms / 1e3 if settings.tpot_ms else FIRST_TPOT_S
        self._due = FITS_AT[0] if settings.ttft_ms is None or settings.tpot_ms is None else None
        """Number of measured steps at which targets are derived next; None if all are given."""

    def update(self, traffic: RecentTraffic) -> bool:
        """Derives the targets anew if it is time. Returns whether they changed."""
        if self._due is None or self._cost_model.num_observed < self._due:
            return False
        self._due = self._cost_model.num_observed + UPDATE_STEPS
        before = self.ttft_slo_s, self.tpot_slo_s
        if self._settings.tpot_ms is None:
            self.tpot_slo_s = max(OVER_ALONE * _stream_s(self._cost_model), LEAST_TPOT_S)
        if self._settings.ttft_ms is None:
            prompts = traffic.prompts
            prompt_s = _prompt_s(self._cost_model, int(prompts.mean_tokens)) if prompts is not None else 0.0
            self.ttft_slo_s = max(TTFT_OVER_TPOT * self.tpot_slo_s, OVER_ALONE * prompt_s)
        return before != (self.ttft_slo_s, self.tpot_slo_s)


def _stream_s(cost_model: CostModel) -> float:
    """Time of a step with one stream."""
    shape = BatchShape()
    shape.add(1, USUAL_CONTEXT_TOKENS)
    return cost_model.predict(shape).seconds


def _prompt_s(cost_model: CostModel, num_tokens: int) -> float:
    shape = BatchShape()
    shape.add(max(num_tokens, 1), 0)
    return cost_model.predict(shape).seconds

"""Which tokens grammars allow in the steps of vLLM's workers: filled here, applied there, before anything else."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neaptide.engine.steps.plan import StepPlan
from neaptide.executors.grammar_masks import GrammarMasks, StepFill
from neaptide.executors.grammar_places import Follower
from neaptide.executors.recent_tokens import RecentTokens
from neaptide.executors.step_mask import Constrained, StepMask

if TYPE_CHECKING:  # an executor has grammars, and their tokens come from its steps
    from neaptide.executors.vllm.vllm_executor import VllmHandle


class SampledPart(NamedTuple):
    """What a part of a step samples."""

    handle: "VllmHandle"
    part: int

    def wait(self) -> int:
        """Only in the thread that submits steps: that of vLLM's workers takes no other."""
        return int(self.handle.wait().token_ids[self.part])


@dataclass(slots=True)
class _Bound:
    """A request with a grammar."""

    follower: Follower
    num_prompt_tokens: int
    recent: RecentTokens[SampledPart] = field(default_factory=RecentTokens)


class LaterFill:
    """The masks of one step, on their way."""

    def __init__(self, masks: GrammarMasks, constrained: list[Constrained]) -> None:
        self._masks = masks
        self._constrained = constrained
        # Where a token is still being sampled, the forward pass is launched first.
        self._filling: StepFill | None = None
        if not any(request.waits for request in constrained):
            self._filling = masks.fill(constrained)

    def result(self) -> StepMask:
        """Waits for them, and for the step before if that samples what they depend on."""
        if self._filling is None:
            for request in self._constrained:
                request.tokens()
            self._filling = self._masks.fill(self._constrained)
        return self._filling.collect()


class StepGrammars:
    """The requests with grammars, and what may come next in each."""

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        self._bound: dict[str, _Bound] = {}

    @property
    def request_ids(self) -> Collection[str]:
        """Of those that have not ended."""
        return self._bound.keys()

    def heed(self, plan: StepPlan) -> None:
        """Takes in which requests ended and began."""
        if self._bound:
            for request_id in plan.finished_ids:
                self._forget(request_id)
        for new in plan.new_requests:
            self._forget(new.request_id)
            if new.params.grammar:
                bound = self._bound[new.request_id] = _Bound(Follower(new.params.grammar), len(new.prompt_token_ids))
                self._masks.compile(bound.follower)

    def _forget(self, request_id: str) -> None:
        if (bound := self._bound.pop(request_id, None)) is not None:
            self._masks.leave(bound.follower)

    def begin(self, plan: StepPlan, refused: Collection[str]) -> LaterFill | None:
        """Begins to fill a step's masks, before its forward pass; None if it needs none.

        Args:
            refused: requests that the workers do not hear of.
        """
        constrained = [
            Constrained.of(plan, part, bound.follower, bound.num_prompt_tokens, bound.recent)
            for part, bound in self._sampling(plan)
            if plan.request_ids[part] not in refused
        ]
        return LaterFill(self._masks, constrained) if constrained else None

    def submitted(self, plan: StepPlan, handle: "VllmHandle") -> None:
        """The step's tokens come from this handle."""
        for part, bound in self._sampling(plan):
            bound.recent.keep(int(plan.output_position[part]), SampledPart(handle, part))

    def close(self) -> None:
        self._bound.clear()
        self._masks.close()

    def _sampling(self, plan: StepPlan) -> list[tuple[int, _Bound]]:
        if not self._bound:
            return []
        ids = plan.request_ids
        parts = np.flatnonzero(plan.sample).tolist()
        return [(part, self._bound[ids[part]]) for part in parts if ids[part] in self._bound]

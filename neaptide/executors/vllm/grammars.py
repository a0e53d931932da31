"""Grammar masks for vLLM's workers: computed here, applied there before any other edit of the logits."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neaptide.engine.steps.plan import StepPlan
from neaptide.executors.grammar_masks import GrammarMasks, StepFill
from neaptide.executors.grammar_places import Follower
from neaptide.executors.recent_tokens import RecentTokens
from neaptide.executors.step_mask import Constrained, StepMask

if TYPE_CHECKING:  # a cycle: the executor has grammars, and their tokens come from its steps
    from neaptide.executors.vllm.vllm_executor import VllmHandle


class SampledPart(NamedTuple):
    """The sampled token of one part of a step."""

    handle: "VllmHandle"
    part: int

    def wait(self) -> int:
        """The token. Call this only in the thread that submits steps: vLLM's workers accept no other."""
        return int(self.handle.wait().token_ids[self.part])


@dataclass(slots=True)
class _Bound:
    """A request with a grammar."""

    follower: Follower
    num_prompt_tokens: int
    recent: RecentTokens[SampledPart] = field(default_factory=RecentTokens)


class LaterFill:
    """The masks of one step, started as soon as the tokens are known."""

    def __init__(self, masks: GrammarMasks, constrained: list[Constrained]) -> None:
        self._masks = masks
        self._constrained = constrained
        # If a token is still being sampled, the forward pass is launched first.
        self._filling: StepFill | None = None
        if not any(request.waits for request in constrained):
            self._filling = masks.fill(constrained)

    def result(self) -> StepMask:
        """The masks. Waits for them, and for the previous step if it samples a token that they need."""
        if self._filling is None:
            for request in self._constrained:
                request.tokens()
            self._filling = self._masks.fill(self._constrained)
        return self._filling.collect()


class StepGrammars:
    """The requests with grammars, and their positions."""

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        self._bound: dict[str, _Bound] = {}

    @property
    def request_ids(self) -> Collection[str]:
        """Requests that have not ended."""
        return self._bound.keys()

    def heed(self, plan: StepPlan) -> None:
        """Handles the plan's ended and new requests."""
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
        """Starts computing a step's masks before its forward pass; None if it needs none.

        Args:
            refused: requests that the workers do not receive.
        """
        constrained = [
            Constrained.of(plan, part, bound.follower, bound.num_prompt_tokens, bound.recent)
            for part, bound in self._sampling(plan)
            if plan.request_ids[part] not in refused
        ]
        return LaterFill(self._masks, constrained) if constrained else None

    def submitted(self, plan: StepPlan, handle: "VllmHandle") -> None:
        """Records that the step's tokens come from this handle."""
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

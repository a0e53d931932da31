"""An engine core on a real executor, for tests that look at what requests get out of it."""

from collections.abc import Sequence
from typing import Any

from neaptide.engine.clock import MonotonicClock, VirtualClock
from neaptide.engine.config import EngineConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import Executor
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AddRequest, RequestOutput, TokenLogprobs
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.timer import StepTimer
from neaptide.estimator.cost.iteration_time import ConstantCostModel

NUM_OUTPUT = 12
"""Tokens of every answer, unless a test asks for others."""
EOS_TOKEN_ID = 2


class EngineRun:
    """Runs requests through an engine without targets or headroom; keeps what they put out.

    Args:
        may_fail: requests may end with an error; else that is an AssertionError.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        may_fail: bool = False,
        eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,),
    ) -> None:
        headroom = FixedHeadroom(executor.num_blocks, 0.0)
        model = ConstantCostModel(1e-6)
        self.clock = MonotonicClock()
        self.core = EngineCore(config, executor, model, headroom, self.clock, frozenset(eos_token_ids))
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.ends: dict[str, RequestOutput] = {}
        self.loaded_blocks = 0
        """From host memory."""
        self._may_fail = may_fail

    def add(self, name: str, prompt: Sequence[int], tier: Tier = Tier.DEFAULT, **params: Any) -> None:
        sampling = SamplingParams(**({"max_tokens": NUM_OUTPUT, "temperature": 0.0, "ignore_eos": True} | params))
        self.core.handle(AddRequest(name, list(prompt), sampling, tier, 0.0, 1e9, 1e9))
        self.tokens[name] = []

    def step(self) -> None:
        outputs = self.core.step()
        self.loaded_blocks += sum(stats.loaded_blocks for stats in outputs.stats)
        for output in outputs.outputs:
            assert self._may_fail or output.error is None, output.error
            self.tokens[output.request_id] += output.new_token_ids
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
            self.prompt_logprobs.setdefault(output.request_id, []).extend(output.prompt_logprobs or [])
            if output.finish_reason is not None:
                self.ends[output.request_id] = output
        self.core.check_integrity()

    def preempt(self, victim: Request) -> None:
        scheduler = self.core.scheduler
        budget = StepBudget(scheduler.cost_model, scheduler.max_step_tokens)
        draft = Draft(scheduler.index, 0.0, scheduler.queues, budget)
        draft.preempt(victim)
        assert scheduler.apply(draft, StepTimer(VirtualClock())) is None

    def finish(self) -> None:
        while self.core.has_work:
            self.step()

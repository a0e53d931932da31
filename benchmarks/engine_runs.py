"""Runs an engine without a server: its answers to prompts, and the times of its steps."""

from collections.abc import Sequence

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import EngineConfig
from neaptide.engine.messages import AbortRequest, AddRequest, StepStats
from neaptide.engine.params import SamplingParams, Tier
from neaptide.launch.engine import build_engine

WARM_UP_STEPS = 8


class Engine:
    """An engine built and warmed up as a server does it; its requests have no targets."""

    def __init__(self, config: EngineConfig) -> None:
        self._clock = MonotonicClock()
        self.core, self.ready = build_engine(config, self._clock)
        self._num_asked = 0

    def generate(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy answers of exactly ``new_tokens`` tokens each; all prompts are submitted at once."""
        ids = self.ask(prompts, new_tokens)
        tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
        while self.core.has_work:
            for output in self.core.step().outputs:
                assert output.error is None, output.error
                tokens[output.request_id] += output.new_token_ids
        return [tokens[request_id] for request_id in ids]

    def decode(self, prompts: Sequence[list[int]], steps: int) -> list[StepStats]:
        """Stats of ``steps`` steps, in each of which every prompt decodes one token. Prompts must leave room
        for that."""
        # The first prompts decode while others are computed, which takes at most one step each.
        new_tokens = len(prompts) + 2 * (WARM_UP_STEPS + steps)
        ids = self.ask(prompts, min(new_tokens, self.ready.max_model_len - max(map(len, prompts))))
        found: list[StepStats] = []
        while len(found) < WARM_UP_STEPS + steps and self.core.has_work:
            for stats in self.core.step().stats:
                is_whole = stats.offline_decode_tokens == len(prompts) and not stats.offline_prefill_tokens
                found += [stats] if is_whole else []
        self.abort(ids)
        assert len(found) == WARM_UP_STEPS + steps, "the prompts ended too early"
        return found[WARM_UP_STEPS:]

    def run_for(self, seconds: float) -> None:
        """Steps for so long.

        Raises:
            AssertionError: nothing is left to do.
        """
        end_s = self._clock.now() + seconds
        while self._clock.now() < end_s:
            self.core.step()
            assert self.core.has_work, "the prompts ended too early"

    def abort(self, ids: list[str]) -> None:
        self.core.handle(AbortRequest(ids))
        while self.core.has_work:
            self.core.step()

    def close(self) -> None:
        self.core.close()

    def ask(self, prompts: Sequence[list[int]], new_tokens: int) -> list[str]:
        """Submits prompts, all at once, for greedy answers of exactly ``new_tokens`` tokens. Returns their ids."""
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        ids = [str(self._num_asked + i) for i in range(len(prompts))]
        self._num_asked += len(prompts)
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.core.handle(AddRequest(request_id, prompt, params, Tier.FLEX, self._clock.now(), 1.0, 1.0))
        return ids

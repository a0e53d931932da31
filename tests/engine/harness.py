"""An EngineCore on a virtual clock with the simulated executor, and the messages to feed it."""

from collections import defaultdict
from pathlib import Path

from neaptide.engine.clock import VirtualClock
from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.core import EngineCore
from neaptide.engine.interfaces import CostModel
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.messages import AddBatch, AddRequest, RequestOutput
from neaptide.engine.observer import EngineObserver
from neaptide.engine.offline.prefix_tree import write_prefixes
from neaptide.engine.offline.token_file import TokenFileWriter
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.step import Step
from neaptide.estimator.cost.iteration_time import ConstantCostModel
from neaptide.executors.simulated.hash_executor import SimExecutor


def online(request_id: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> AddRequest:
    values: dict[str, object] = {"tier": Tier.DEFAULT, "arrival_s": 0.0, "ttft_slo_s": 1.0, "tpot_slo_s": 0.1} | fields
    params = values.pop("params", SamplingParams(max_tokens=max_tokens))
    return AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params, **values)  # type: ignore[arg-type]


def flex(request_id: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> AddRequest:
    return online(request_id, prompt, max_tokens, **({"tier": Tier.FLEX} | fields))


def batch(directory: Path, batch_id: str, prompts: list[list[int]], max_tokens: int = 4) -> AddBatch:
    stem = str(directory / batch_id)
    with TokenFileWriter(stem, is_durable=False) as writer:
        for prompt in prompts:
            writer.append(prompt)
    write_prefixes(stem, is_durable=False)
    rows = list(range(len(prompts)))
    return AddBatch(batch_id, stem, rows, [SamplingParams(max_tokens=max_tokens)], [0] * len(rows), [], 1e9)


class Watch(EngineObserver):
    """Notes starts and ends, and the step planned last."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.last: Step | None = None

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        self.last = step
        self.log += [("start", new.request_id) for new in step.plan.new_requests]

    def ended(self, request: Request, reason: FinishReason) -> None:
        self.log.append(("end", request.request_id))

    def refused(self, request_id: str) -> None:
        self.log.append(("end", request_id))


class Harness:
    """Collects tokens and terminal outputs per request; checks integrity after every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        cost_model: CostModel | None = None,
        cache: CacheConfig | None = None,
        headroom_ratio: float = 0.0,
        eos_token_ids: frozenset[int] = frozenset(),
        **scheduler: object,
    ) -> None:
        self.clock = VirtualClock()
        self.cost_model = cost_model or ConstantCostModel(0.01)
        values: dict[str, object] = {"max_model_len": 4096, "offline_max_kv_ratio": 1.0} | scheduler
        config = EngineConfig(
            cache=cache or CacheConfig(block_size=4),
            scheduler=SchedulerConfig(**values),  # type: ignore[arg-type]
        )
        self.executor = SimExecutor(num_blocks, self.cost_model, self.clock, vocab_size=1000)
        headroom = FixedHeadroom(num_blocks, headroom_ratio)
        self.watch = Watch()
        self.core = EngineCore(
            config,
            self.executor,
            self.cost_model,
            headroom,
            self.clock,
            eos_token_ids,
            observers=[self.watch],
        )
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, list[RequestOutput]] = defaultdict(list)

    def step(self) -> dict[str, int]:
        """One step; returns how many tokens each request computed in it."""
        self.watch.last = None
        outputs = self.core.step()
        self.core.check_integrity()
        for output in outputs.outputs:
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id].append(output)
        step = self.watch.last
        if step is None:
            return {}
        tokens = dict(zip(step.plan.request_ids, step.plan.num_tokens.tolist(), strict=True))
        assert len(tokens) == len(step.plan), "a request takes part twice"
        assert sum(tokens.values()) <= self.core.scheduler.max_step_tokens
        return tokens

    @property
    def log(self) -> list[tuple[str, str]]:
        """(event, request id): ``start`` at a request's first step, ``end`` at its end."""
        return self.watch.log

    def run(self, max_steps: int = 10_000) -> list[dict[str, int]]:
        steps = []
        while self.core.has_work:
            steps.append(self.step())
            assert len(steps) <= max_steps, "the engine does not come to an end"
        return steps

    def reason(self, request_id: str) -> FinishReason | None:
        (output,) = self.ends[request_id]
        return output.finish_reason

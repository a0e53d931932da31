"""What a step's offline fill gets done, against the best choice there is: Echo's equation (3) over one step.

A step gets done what its tokens are worth: seconds of work at the ceiling, that is in a full step of prompts or beside
as many decodes as there are seats; or, as in the paper, one each. Nothing is evicted here, so there is no punishment.
The exact solver tries every choice under the limits that the policy had: every set of residents that decode, every set
of prompts that are computed whole, and of the others each in turn as far as time and tokens go. Nobody starts whose
whole prompt has no room.

``python -m tests.engine.scheduler.step_optimum`` prints how far the policy stays behind.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import compress, product

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.kv.draft import NO_HIT
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.packing import NeaptideScheduler
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.table import RequestTable
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import load_profile

NOW_S = 10.0
BLOCK_SIZE = 16
MAX_TOKENS = 8192
STEP_TOKENS, SEATS = 2048, 256
TPOT_S = 0.05
SPOKEN_TOKENS = 10
"""That every resident decode has put out."""
COST_MODEL = RooflineModel.from_profile(load_profile("a100-40g-llama-3.1-8b"))


@cache
def decode_worth_s(context_tokens: int) -> float:
    shape = BatchShape()
    shape.add_decodes(SEATS, SEATS * (context_tokens + 1), context_tokens + 1)
    return COST_MODEL.predict(shape).seconds / SEATS


@cache
def prompt_worth_s(context_tokens: int) -> float:
    shape = BatchShape()
    shape.add(STEP_TOKENS, context_tokens)
    return COST_MODEL.predict(shape).seconds / STEP_TOKENS


@dataclass(slots=True, frozen=True)
class Candidate:
    """A request; ``num_tokens`` it lacks, on top of ``context_tokens``. One that waits has no context."""

    request_id: str
    num_tokens: int
    context_tokens: int = 0
    is_online: bool = False
    slack_s: float = 0.0
    """Until the next token of an online one is due."""

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1

    def num_blocks(self, num_tokens: int) -> int:
        """New ones."""
        return -(-(self.context_tokens + num_tokens) // BLOCK_SIZE) - -(-self.context_tokens // BLOCK_SIZE)

    def worth_s(self, num_tokens: int) -> float:
        if self.is_decode:
            return decode_worth_s(self.context_tokens)
        return num_tokens * prompt_worth_s(self.context_tokens + num_tokens // 2)


Choice = dict[Candidate, int]
"""Offline requests that take part, and with how many tokens."""


def worth_s(choice: Choice) -> float:
    return sum(candidate.worth_s(num_tokens) for candidate, num_tokens in choice.items())


def num_tokens_of(choice: Choice) -> float:
    return sum(choice.values())


@dataclass(slots=True)
class Instance:
    """At most eight requests. Online ones have a token due and take part in any case."""

    candidates: list[Candidate]
    num_empty_blocks: int
    limit_s: float = field(init=False, default=0.0)
    """What the policy lets the step take; known once it has packed."""

    @property
    def offline(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if not candidate.is_online]

    def budget(self) -> StepBudget:
        """With the online requests in it."""
        budget = StepBudget(COST_MODEL, STEP_TOKENS)
        for candidate in self.candidates:
            if candidate.is_online:
                budget.add(1, candidate.context_tokens)
        return budget

    def choices(self) -> Iterator[Choice]:
        """All that are worth a look: where two prompts are cut, one of them could as well have the other's tokens."""
        online_blocks = sum(c.num_blocks(1) for c in self.candidates if c.is_online)
        for picks in product((False, True), repeat=len(self.offline)):
            whole = {candidate: candidate.num_tokens for candidate in compress(self.offline, picks)}
            budget = self.budget()
            if not all(self._add(budget, candidate) for candidate in whole):
                continue
            blocks_left = self.num_empty_blocks - online_blocks - sum(c.num_blocks(n) for c, n in whole.items())
            if blocks_left < 0:
                continue
            yield whole
            for candidate in self.offline:
                if (
                    candidate in whole
                    or candidate.is_decode
                    or candidate.num_blocks(candidate.num_tokens) > blocks_left
                ):
                    continue
                if chunk := budget.largest_chunk(candidate.num_tokens, candidate.context_tokens, self.limit_s):
                    yield whole | {candidate: chunk}

    def _add(self, budget: StepBudget, candidate: Candidate) -> bool:
        num_tokens = candidate.num_tokens
        fits = budget.largest_chunk(num_tokens, candidate.context_tokens, self.limit_s) == num_tokens
        budget.add(candidate.num_tokens, candidate.context_tokens)
        return fits

    # ---- the policy ----

    def packed(self) -> Choice | None:
        """What one step of the policy takes; None if it preempted a request."""
        held = sum(-(-c.context_tokens // BLOCK_SIZE) for c in self.candidates)
        num_blocks = held + self.num_empty_blocks
        table = RequestTable(len(self.candidates), MAX_TOKENS, BLOCK_SIZE)
        config = SchedulerConfig(
            max_num_seqs=len(self.candidates), max_num_batched_tokens=STEP_TOKENS, offline_max_kv_ratio=1.0
        )
        kv = KVCacheManager(num_blocks, table, enable_prefix_cache=False)
        scheduler = NeaptideScheduler(config, kv, COST_MODEL, FixedHeadroom(num_blocks, 0.0))
        for candidate in self.candidates:
            _submit(scheduler, candidate)
        scheduler.begin(NOW_S)
        draft: Draft = scheduler.draft(NOW_S)
        if draft.preempted.total:
            return None
        self.limit_s = draft.limit_s
        taken = {request.request_id: num_tokens for request, num_tokens in draft.parts()}
        assert all(c.request_id in taken for c in self.candidates if c.is_online)
        return {c: taken[c.request_id] for c in self.offline if c.request_id in taken}


def _submit(scheduler: NeaptideScheduler, candidate: Candidate) -> None:
    num_spoken = SPOKEN_TOKENS if candidate.is_decode else 0
    request = Request(
        candidate.request_id,
        [7] * (candidate.context_tokens + candidate.num_tokens - num_spoken),
        SamplingParams(max_tokens=64),
        Tier.DEFAULT if candidate.is_online else Tier.FLEX,
        NOW_S - 1.0,
        1.0,
        TPOT_S,
    )
    request._output_token_ids = [7] * num_spoken
    request.first_token_s = NOW_S + candidate.slack_s - SPOKEN_TOKENS * TPOT_S
    queues = scheduler.queues
    if request.is_online:
        queues.add_online(request)
    else:
        queues.pool.add_flex(request)
    if candidate.context_tokens:
        queues.start(request)
        queues.kv.admit(request, NO_HIT)
        queues.kv.grow(request, candidate.context_tokens)
        queues.table.computed[request.slot] = candidate.context_tokens


def random_instance(rng: random.Random) -> Instance:
    """Chats, residents that decode or have part of a prompt, and a pool. Residents have room to grow."""
    found = [
        Candidate(f"chat{k}", 1, rng.randint(100, 3000), True, rng.uniform(1.3, 3.0) * TPOT_S)
        for k in range(rng.randint(0, 2))
    ]
    found += [Candidate(f"decode{k}", 1, rng.randint(100, 4000)) for k in range(rng.randint(0, 3))]
    found += [Candidate(f"prompt{k}", rng.randint(20, 2000), rng.randint(16, 2000)) for k in range(rng.randint(0, 1))]
    found += [Candidate(f"pool{k}", rng.randint(20, 3000)) for k in range(rng.randint(1, 2))]
    growth = sum(c.num_blocks(c.num_tokens) for c in found if c.context_tokens)
    return Instance(found, growth + rng.choice([40, 120, 1000]))


@dataclass(slots=True)
class Gap:
    """The policy's step against the optimum, over random instances."""

    compared: int = 0
    preempted: int = 0
    idle: int = 0
    """Nothing fits, for the best choice neither."""
    work_sum: float = 0.0
    tokens_sum: float = 0.0
    """Of ratios."""
    least_work: float = 1.0
    most_work: float = 0.0

    @property
    def mean_work(self) -> float:
        return self.work_sum / self.compared

    @property
    def mean_tokens(self) -> float:
        return self.tokens_sum / self.compared

    def add(self, instance: Instance) -> None:
        packed = instance.packed()
        if packed is None:
            self.preempted += 1
            return
        choices = list(instance.choices())
        best_s, most_tokens = max(map(worth_s, choices), default=0.0), max(map(num_tokens_of, choices), default=0.0)
        if not best_s:
            self.idle += 1
            return
        ratio = worth_s(packed) / best_s
        self.compared += 1
        self.work_sum += ratio
        self.tokens_sum += num_tokens_of(packed) / most_tokens
        self.least_work, self.most_work = min(self.least_work, ratio), max(self.most_work, ratio)


def measure(num_instances: int, seed: int = 0) -> Gap:
    rng, gap = random.Random(seed), Gap()
    for _ in range(num_instances):
        gap.add(random_instance(rng))
    return gap


if __name__ == "__main__":
    result = measure(500)
    print(result, f"mean ratios: work {result.mean_work:.4f}, tokens {result.mean_tokens:.4f}")

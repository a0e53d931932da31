"""BROS's scheduling problem, equations (1)-(8), solved exactly for a few requests, and one step of the policy on it.

``python -m lab.tests.policies.bros_ilp`` prints how far the policy's greedy packing stays behind.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress, product

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import Prediction
from neaptide.engine.kv.draft import NO_HIT
from neaptide.engine.kv.headroom import FixedHeadroom
from neaptide.engine.kv.manager import KVCacheManager
from neaptide.engine.params import SamplingParams, Tier
from neaptide.engine.request import Request
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.table import RequestTable
from neaptide_lab.policies.bros import AdaptiveBatchSize, BrosScheduler

NOW_S = 10.0
BLOCK_SIZE = 16
MAX_TOKENS = 2048
TTFT_S, TPOT_S = 0.4, 0.2
"""The paper's targets."""


class LinearCost:
    """Step times of an 8B model on an A100: linear in tokens and context, each phase by itself, as the paper fits."""

    def predict(self, shape: BatchShape) -> Prediction:
        prefill_s = 1e-4 * shape.prefill_tokens
        decode_s = 1e-4 * shape.decode_requests + 3e-7 * shape.decode_context_tokens
        return Prediction(0.015 + prefill_s + decode_s, 0.0)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        pass


@dataclass(slots=True, frozen=True)
class Candidate:
    request_id: str
    is_online: bool
    num_tokens: int
    """To compute: a whole prompt, or 1."""
    context_tokens: int
    """0 for one that waits."""
    elapsed_s: float

    @property
    def remaining_s(self) -> float:
        return (TPOT_S if self.context_tokens else TTFT_S) - self.elapsed_s

    @property
    def num_blocks(self) -> int:
        """New ones: a context of whole blocks needs one for its next token."""
        return -(-(self.context_tokens + self.num_tokens) // BLOCK_SIZE) - -(-self.context_tokens // BLOCK_SIZE)


def num_best_effort(chosen: list[Candidate]) -> int:
    return sum(not candidate.is_online for candidate in chosen)


@dataclass(slots=True, frozen=True)
class Instance:
    candidates: list[Candidate]
    """BE ones in the order of their pool."""
    batch_size: int
    num_empty_blocks: int
    mean_step_s: float

    def seconds(self, chosen: list[Candidate]) -> float:
        shape = BatchShape()
        for candidate in chosen:
            shape.add(candidate.num_tokens, candidate.context_tokens)
        return LinearCost().predict(shape).seconds

    def is_feasible(self, chosen: list[Candidate]) -> bool:
        """Constraints (6), (7), (8); (6) for the RT requests that can still meet their deadline at all."""
        step_s = self.seconds(chosen)
        if len(chosen) > self.batch_size or sum(c.num_blocks for c in chosen) > self.num_empty_blocks:
            return False
        for rt in self.candidates:
            if rt.is_online and self.seconds([rt]) <= rt.remaining_s:
                wait_s = 0.0 if rt in chosen else self.mean_step_s
                if step_s + wait_s > rt.remaining_s:
                    return False
        return True

    def throughput(self, chosen: list[Candidate]) -> float:
        """The objective (1): BE tokens per second."""
        return num_best_effort(chosen) / self.seconds(chosen)

    def feasible_batches(self) -> Iterator[list[Candidate]]:
        """All of them, one by one: the exact solver."""
        for picks in product((False, True), repeat=len(self.candidates)):
            chosen = list(compress(self.candidates, picks))
            if chosen and self.is_feasible(chosen):
                yield chosen

    def packed(self) -> list[Candidate] | None:
        """What one step of the policy takes; None if it dropped requests, which the problem does not know."""
        held = sum(-(-c.context_tokens // BLOCK_SIZE) for c in self.candidates)
        num_blocks = held + self.num_empty_blocks
        table = RequestTable(len(self.candidates), MAX_TOKENS, BLOCK_SIZE)
        kv = KVCacheManager(num_blocks, table, enable_prefix_cache=False)
        scheduler = BrosScheduler(SchedulerConfig(), kv, LinearCost(), FixedHeadroom(num_blocks, 0.0))
        scheduler.batch_size = AdaptiveBatchSize(self.batch_size, self.batch_size)
        scheduler._mean_step_s = self.mean_step_s
        for candidate in self.candidates:
            self._submit(scheduler, candidate)
        scheduler.begin(NOW_S)
        draft = scheduler.draft(NOW_S)
        if draft.preempted.total:
            return None
        chosen = {request.request_id for request, _ in draft.parts()}
        return [c for c in self.candidates if c.request_id in chosen]

    def _submit(self, scheduler: BrosScheduler, candidate: Candidate) -> None:
        tier = Tier.DEFAULT if candidate.is_online else Tier.FLEX
        num_prompt_tokens = candidate.context_tokens or candidate.num_tokens
        request = Request(
            candidate.request_id,
            [7] * num_prompt_tokens,
            SamplingParams(max_tokens=64),
            tier,
            NOW_S - candidate.elapsed_s,
            TTFT_S,
            TPOT_S,
        )
        queues = scheduler.queues
        if candidate.context_tokens:
            request._output_token_ids.append(7)
        if request.is_online:
            queues.add_online(request)
        else:
            queues.pool.add_flex(request)
        if candidate.context_tokens:
            queues.start(request)
            queues.kv.admit(request, NO_HIT)
            queues.kv.grow(request, candidate.context_tokens)
            queues.table.computed[request.slot] = candidate.context_tokens
            if request.is_online:
                scheduler._returned_s[request] = NOW_S - candidate.elapsed_s


def random_instance(rng: random.Random) -> Instance:
    """Lengths after the paper's Table 2; at most nine requests, in every state."""
    candidates = []
    for index in range(rng.randint(1, 4)):
        is_resident = rng.random() < 0.6
        context = rng.randint(50, 900) if is_resident else 0
        tokens = 1 if is_resident else rng.randint(20, 450)
        elapsed_s = rng.uniform(0.0, 0.9 * (TPOT_S if is_resident else TTFT_S))
        candidates.append(Candidate(f"rt{index}", True, tokens, context, elapsed_s))
    for index in range(rng.randint(1, 5)):
        is_resident = rng.random() < 0.6
        context = rng.randint(512, 1150) if is_resident else 0
        candidates.append(Candidate(f"be{index}", False, 1 if is_resident else rng.randint(512, 1024), context, 0.0))
    return Instance(candidates, rng.randint(2, 7), rng.choice([10, 80, 1000]), rng.uniform(0.02, 0.1))


@dataclass(slots=True)
class Gap:
    """Greedy packing against the optimum, over random instances."""

    instances: int = 0
    infeasible: int = 0
    """No batch satisfies all constraints."""
    dropped: int = 0
    violated: int = 0
    """There is a feasible batch, but the packed one leaves an RT request out that cannot wait."""
    compared: int = 0
    optimal: int = 0
    """As much throughput as any feasible batch."""
    as_many: int = 0
    """As many BE requests as any feasible batch."""
    none: int = 0
    """No BE request, where some feasible batch has one."""
    ratio_sum: float = 0.0
    max_ratio: float = 0.0

    @property
    def mean_ratio(self) -> float:
        return self.ratio_sum / self.compared

    def add(self, instance: Instance) -> None:
        self.instances += 1
        feasible, packed = list(instance.feasible_batches()), instance.packed()
        if not feasible:
            self.infeasible += 1
        elif packed is None:
            self.dropped += 1
        elif not instance.is_feasible(packed):
            self.violated += 1
        elif (most := max(map(num_best_effort, feasible))) > 0:
            ratio = instance.throughput(packed) / max(map(instance.throughput, feasible))
            self.compared += 1
            self.ratio_sum += ratio
            self.max_ratio = max(self.max_ratio, ratio)
            self.optimal += ratio > 1.0 - 1e-9
            self.as_many += num_best_effort(packed) == most
            self.none += num_best_effort(packed) == 0


def measure(num_instances: int, seed: int = 0) -> Gap:
    rng, gap = random.Random(seed), Gap()
    for _ in range(num_instances):
        gap.add(random_instance(rng))
    return gap


if __name__ == "__main__":
    result = measure(2_000)
    print(result, f"mean ratio {result.mean_ratio:.4f}")

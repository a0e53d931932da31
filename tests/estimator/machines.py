"""Made-up machines and random steps for the tests of iteration-time models."""

import random
from collections.abc import Callable

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.cost.iteration_time import Regime, StepSample

Machine = Callable[[BatchShape], float]


def decodes(count: int, context_tokens: int) -> BatchShape:
    """``count`` decodes that read ``context_tokens`` each."""
    shape = BatchShape()
    for _ in range(count):
        shape.add(1, context_tokens - 1)
    return shape


def prefills(count: int, num_tokens: int) -> BatchShape:
    shape = BatchShape()
    for _ in range(count):
        shape.add(num_tokens, 0)
    return shape


def random_shape(rng: random.Random, regime: Regime | None = None) -> BatchShape:
    regime = regime or rng.choice(list(Regime))
    shape = BatchShape()
    if regime is not Regime.DECODE:
        for _ in range(rng.randrange(1, 3)):
            shape.add(rng.randrange(2, 400), rng.randrange(0, 600))
    if regime is not Regime.PREFILL:
        for _ in range(rng.randrange(1, 60)):
            shape.add(1, rng.randrange(1, 1200))
    return shape


def linear_machine(shape: BatchShape, mixed: float = 1.0) -> float:
    """Seconds; beyond 64 tokens each costs more, and mixed steps cost ``mixed`` times as much."""
    seconds = 4e-3 + 1.2e-4 * shape.num_tokens + 2e-5 * max(shape.num_tokens - 64, 0)
    seconds += 3e-8 * shape.prefill_attention_pairs + 6e-7 * shape.decode_context_tokens + 5e-5 * shape.decode_requests
    return seconds * (mixed if shape.prefill_requests and shape.decode_requests else 1.0)


def measure(
    machine: Machine, seed: int, count: int, noise: float = 0.0, regime: Regime | None = None
) -> list[StepSample]:
    """Random steps, timed with log-normal noise."""
    rng = random.Random(seed)
    shapes = [random_shape(rng, regime) for _ in range(count)]
    return [StepSample(shape, machine(shape) * rng.lognormvariate(0.0, noise)) for shape in shapes]

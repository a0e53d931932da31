"""What online work leaves of the device, and so which mix of offline work belongs beside it.

Two time scales (ADR 0016): admission from the ends of a plan shapes the next minutes, so it follows an average over
half a minute; within a step prompts are paced, so that what is at work together has the density that admission aims at
in every step and not only on average.
"""

import math

from neaptide.engine.offline.planned import Ends
from neaptide.engine.offline.planning.work_left import StepMeans, WorkLeft
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.steps.step import Step

AVERAGE_S = 30.0
"""Time constant of the residual that admission follows."""
LONG_S = 600.0
"""Time constant of the residual that says which of the two is scarce in the long run."""
LEAST_PACED_TOKENS = 128
"""A step's prompts always get so many: BlendServe's batches come in multiples of it."""
MOST_PACED_TOKENS = 1 << 30
"""More than any step has: where next to nothing is left to read, a density says nothing."""
DRY_SHARE = 0.3
"""Fraction of the longest answer's steps that is lost while the last answers end one after another and no others take
their place. Memory runs dry over twice as many (measured: 0.2 to 0.36)."""
LEAST_LEFT = 0.05
"""Least fraction of a step's compute and bandwidth that is taken to be left."""


class Residual:
    """Seconds of compute and of memory that online work leaves of each step, averaged."""

    def __init__(self) -> None:
        self._compute_s = [0.0, 0.0]
        """Decayed sums over half a minute, over ten minutes."""
        self._memory_s = [0.0, 0.0]

    def observe(self, step: Step, seconds: float, ends: Ends) -> None:
        """A step took ``seconds``."""
        plan, online = step.plan, step.is_online
        computed_tokens, read_tokens = int(plan.num_tokens[online].sum()), int(plan.num_computed[online].sum())
        compute_s = max(seconds - ends.token_s * computed_tokens, LEAST_LEFT * seconds)
        memory_s = max(seconds - ends.kv_token_s * read_tokens, LEAST_LEFT * seconds)
        for index, window_s in enumerate((AVERAGE_S, LONG_S)):
            kept = math.exp(-seconds / window_s)
            self._compute_s[index] = kept * self._compute_s[index] + compute_s
            self._memory_s[index] = kept * self._memory_s[index] + memory_s

    def density(self, root_density: float) -> float:
        """That offline requests at work together should have.

        Any mix that keeps the scarcer one of compute and bandwidth busy is as fast as any other. The plan's own density
        does, and uses up both ends together, until online work takes so much of what is plenty otherwise that it is
        scarce for the moment: then it is what is left.
        """
        if not self._memory_s[0]:
            return root_density
        now, long = (c / m for c, m in zip(self._compute_s, self._memory_s, strict=True))
        return min(root_density, now) if root_density <= long else max(root_density, now)


def paced_tokens(ends: Ends, density: float, num_decodes: int, read_tokens: int) -> int:
    """Prompt tokens that belong beside so many decodes, which read so many cached tokens.

    Algorithm 3 of BlendServe, ``C = N p / d``, with what is held in place of what a steady state holds: a batch of a
    density computes so many seconds for each that it reads (section 4.2).
    """
    computed_tokens = min(density * ends.kv_token_s * read_tokens / ends.token_s, MOST_PACED_TOKENS)
    return max(int(computed_tokens) - num_decodes, LEAST_PACED_TOKENS)


def in_whole_tiles(num_prompt_tokens: int, num_others: int, tile_tokens: int) -> int:
    """Prompt tokens beside so many others, as near to what is wanted as a step of whole tiles has them, and one at
    least. What is too much in one step is too little in another: what is left of the plan says what comes next."""
    step_tokens = (num_others + num_prompt_tokens + tile_tokens // 2) // tile_tokens * tile_tokens
    if step_tokens <= num_others:
        step_tokens += tile_tokens
    return step_tokens - num_others


def usual_step(left: WorkLeft, kv_tokens: int) -> StepMeans:
    """Means of the steps until all of this is done in so much memory, which runs dry at their end."""
    steps = left.planned_steps or left.held_tokens / max(kv_tokens, 1) + DRY_SHARE * left.longest_steps
    return StepMeans(left.held_tokens / steps, left.read_tokens / steps) if steps else StepMeans(0.0, 0.0)


def num_paced(
    ends: Ends, density: float, before: BatchShape, shape: BatchShape, least_s: float, usual: StepMeans
) -> int:
    """The same for the decodes that the step has got since it was ``before``, in a step that takes ``least_s`` whatever
    it reads: weights are read beside the compute as well. Such a step reads more than its density counts, and less
    where prompts have short answers: ``usual`` tells. Compute that is dealt out by all that is read has the mix of the
    whole in every step, also while memory fills and while it runs dry.
    """
    read_tokens = shape.decode_context_tokens - before.decode_context_tokens
    least_tokens = least_s / ends.kv_token_s
    if usual.read + least_tokens > 0.0:
        density *= usual.held / (usual.read + least_tokens)
    num_decodes = shape.decode_requests - before.decode_requests
    return paced_tokens(ends, density, num_decodes, int(read_tokens + least_tokens))

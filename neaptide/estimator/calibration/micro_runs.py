"""Times steps of a chosen shape on an idle executor."""

from collections.abc import Iterable

from neaptide.engine.clock import Clock
from neaptide.engine.interfaces import Executor
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import BatchShape, NewRequest, ScheduledRequest, StepPlan

Parts = tuple[tuple[int, ...], ...]
"""A step: for each request, the tokens to compute and the context tokens before them.

A third number is the length of a prefix, in whole blocks, which all requests with that number have in common. One read
serves them all.
"""

_TOKEN_ID = 7
_GREEDY = SamplingParams(temperature=0.0)


def shape_of(parts: Parts) -> BatchShape:
    shape = BatchShape()
    for num_tokens, context, *_ in parts:
        shape.add(num_tokens, context)
    shape.shared_prefix_tokens = shared_tokens(parts)
    return shape


def shared_tokens(parts: Parts) -> int:
    """KV tokens of the step that are in another request's blocks."""
    prefixes = [part[2] for part in parts if len(part) > 2]
    return sum(prefixes) - sum(set(prefixes))


class MicroRunner:
    """Runs steps over blocks counted from 0. The blocks' content does not matter, only the time."""

    def __init__(self, executor: Executor, clock: Clock, block_size: int) -> None:
        self._executor = executor
        self._clock = clock
        self._block_size = block_size
        self._steps = 0

    def blocks_of(self, steps: Iterable[Parts]) -> int:
        """Number of blocks of the largest step."""
        return max(map(self._blocks_of, steps), default=0)

    def _blocks_of(self, parts: Parts) -> int:
        num_blocks = sum(-(-sum(part[:2]) // self._block_size) for part in parts)
        return num_blocks - shared_tokens(parts) // self._block_size

    def fits(self, parts: Parts) -> bool:
        """Whether the KV cache can hold the step."""
        return self.blocks_of([parts]) <= self._executor.num_blocks

    def run(self, parts: Parts) -> float:
        """Seconds of one step from submission to result, as the engine measures them.

        Requests with context are announced to the executor first; new prompts come with the step.

        Raises:
            ValueError: the KV cache cannot hold the step.
        """
        if not self.fits(parts):
            raise ValueError(f"{len(parts)} requests do not fit into {self._executor.num_blocks} blocks")
        self._steps += 1
        known: list[NewRequest] = []
        new: list[NewRequest] = []
        scheduled: list[ScheduledRequest] = []
        next_block = 0
        prefixes: dict[int, list[int]] = {}
        for index, (num_tokens, context, *shared) in enumerate(parts):
            request_id = f"calibrate-{self._steps}-{index}"
            prompt = [_TOKEN_ID] * (context + num_tokens)
            (known if context else new).append(NewRequest(request_id, prompt, _GREEDY))
            prefix = prefixes.get(shared[0], []) if shared else []
            count = -(-len(prompt) // self._block_size) - len(prefix)
            blocks = prefix + list(range(next_block, next_block + count))
            scheduled.append(ScheduledRequest(request_id, prompt[context:], context, blocks, True, 0))
            next_block += count
            if shared:
                prefixes[shared[0]] = blocks[: shared[0] // self._block_size]
        plan = StepPlan.of_parts(-self._steps, scheduled, new)
        plan.shape.shared_prefix_tokens = shared_tokens(parts)
        if known:
            self._executor.submit(StepPlan.of_parts(plan.step, [], known)).wait()
        start_s = self._clock.now()
        self._executor.submit(plan).wait()
        seconds = self._clock.now() - start_s
        self._executor.submit(StepPlan.of_parts(plan.step, [], finished_ids=plan.request_ids)).wait()
        return seconds

"""``batchllm``: prefix groups planned over the whole pool, and batches that fill memory (BatchLLM, sections 4.2, 4.3).

Groups are those of Algorithm 1, those first that have the most to decode for what they prefill (``R_group``). In a step
decodes go first, then prompts that were begun, then further ones of the group, then the next group with its prefix: the
three queues of section 4.3.1. Memory-centric batching: a prompt is admitted as long as what is held stays below a
threshold and the step has tokens; there is no other cap than the engine's seats.
"""

from typing import ClassVar

from neaptide.policy import ByAge, Draft, Request, SchedulerConfig, Turns, VllmV1Fcfs

MEMORY_THRESHOLD = 0.95
"""``M_threshold``: fraction of the blocks that may be held after an admission. The paper does not print its value."""


class BatchLlm(VllmV1Fcfs):
    planned_order: ClassVar[str | None] = "batchllm"
    watermark: ClassVar[float] = 1.0 - MEMORY_THRESHOLD

    @classmethod
    def turns(cls, config: SchedulerConfig) -> Turns | None:
        return ByAge()

    def _running(self, draft: Draft) -> list[Request]:
        """Decodes in order of admission, then prompts that were begun."""
        return sorted(super()._running(draft), key=lambda request: request.num_uncomputed_tokens > 1)

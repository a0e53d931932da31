"""Policy ``batchllm``: prefix groups planned over the whole pool, and batches that fill memory (sections 4.2, 4.3).

Groups are those of Algorithm 1, ordered by their decoding per prefill (``R_group``), the largest first. In a step
decodes come first, then started prompts, then further ones of the group, then the next group with its prefix. These are
the three queues of section 4.3.1. Memory-centric batching admits a prompt while the held memory is below a threshold
and the step has tokens. There is no other cap than the engine's slots.
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
        """Decodes in order of admission, then started prompts."""
        return sorted(super()._running(draft), key=lambda request: request.num_uncomputed_tokens > 1)

"""Policy ``blendserve``: the whole pool by compute density, taken from both ends (BlendServe, ASPLOS'26, section 5).

The tree is sorted and split outside of the engine (``offline/planning/blend.py``). The dual scan runs here: each end
fills its part of the memory, and a request that ends returns its memory to its end. That is the correction of section
5.3 for answers that are shorter or longer than expected. The frame is that of ``dfs``, as in section 6.1.
"""

from typing import ClassVar

from neaptide.policy import Draft, VllmV1Fcfs, paced_tokens


class BlendServe(VllmV1Fcfs):
    planned_order: ClassVar[str | None] = "density"

    def pack(self, draft: Draft) -> float:
        self._pace(draft)
        return super().pack(draft)

    def _pace(self, draft: Draft) -> None:
        """Limits the prompt tokens of a step to those that match decodes which fill the memory (Algorithm 3)."""
        ends, budget = draft.pool.ends, draft.budget
        if ends is None:
            return
        num_decodes = sum(request.num_uncomputed_tokens == 1 for request in self._running(draft))
        kv_tokens = draft.kv.pool.num_blocks * draft.kv.block_size
        paced = paced_tokens(ends, ends.root_density, num_decodes, kv_tokens)
        budget.tokens_left = min(budget.tokens_left, num_decodes + paced)

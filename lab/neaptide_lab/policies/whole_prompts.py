"""Frame of BROS's batches, shared by ``bros`` and ``round-robin``."""

from neaptide.policy import NO_HIT, Draft, Request, Scheduler, SchedulerConfig


class WholePromptScheduler(Scheduler):
    """Whole prompts and decodes in one batch, no prefix cache. Resident requests that are not scheduled keep their KV.

    BROS, section 6. The paper does not bound the tokens of a batch. An executor has a bound, as vLLM had before it
    split prompts: the longest prompt fits.
    """

    uses_prefix_cache = False

    @classmethod
    def step_tokens(cls, config: SchedulerConfig) -> int:
        return max(config.max_num_batched_tokens, config.max_model_len)

    def _blocks(self, draft: Draft, request: Request) -> int:
        """Blocks that the request lacks for its next step."""
        return draft.kv.blocks_needed(request, draft.kv.num_uncomputed(request))

    def _take(self, draft: Draft, request: Request) -> None:
        """Adds a resident request, or admits a waiting one: the first of the pool, if it is offline.

        Its blocks are known to be available.
        """
        num_tokens = draft.kv.num_uncomputed(request)
        if draft.is_running(request):
            draft.add(request, num_tokens)
        else:
            draft.admit(request, NO_HIT, num_tokens)

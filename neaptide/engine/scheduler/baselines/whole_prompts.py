"""The frame of BROS's batches, shared by ``bros`` and ``round-robin``."""

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel, HeadroomPredictor
from neaptide.engine.kv.manager import KVCacheManager, PrefixHit
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.step import StepBuilder

NO_HIT = PrefixHit([], 0)


def is_waiting(request: Request) -> bool:
    """Whether it holds no KV yet, or none any more."""
    return request.status is RequestStatus.WAITING


class WholePromptScheduler(Scheduler):
    """Whole prompts and decodes in one batch, no prefix cache; resident requests that sit out keep their KV.

    BROS, section 6. The paper has no bound on the tokens of a batch; an executor has one, as vLLM had before it cut
    prompts: the longest prompt fits.
    """

    uses_prefix_cache = False

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        cost_model: CostModel,
        headroom: HeadroomPredictor,
    ) -> None:
        super().__init__(config, kv, cost_model, headroom)
        self.max_step_tokens = max(config.max_num_batched_tokens, config.max_model_len)

    def _blocks(self, request: Request) -> int:
        """Blocks that the request lacks for its next step."""
        return self.queues.kv.blocks_needed(request, request.num_uncomputed_tokens)

    def _take(self, step: StepBuilder, request: Request) -> None:
        """Adds a resident request, or admits a waiting one: the head of the pool, if it is offline.

        Its blocks are known to be available.
        """
        if not is_waiting(request):
            step.add(request, request.num_uncomputed_tokens)
            return
        if not request.is_online:
            self.queues.pool.pop()
        step.admit(request, NO_HIT, request.num_uncomputed_tokens)

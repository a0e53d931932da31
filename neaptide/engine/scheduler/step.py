"""The step being planned."""

from collections.abc import Container

from neaptide.engine.kv.manager import PrefixHit
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.preemption import Preemptor
from neaptide.engine.scheduler.queues import Queues


class StepBuilder:
    """Who takes part with how many tokens; changes queues and block tables as it goes."""

    def __init__(
        self,
        index: int,
        now_s: float,
        queues: Queues,
        preemptor: Preemptor,
        budget: StepBudget,
        publishes_when_planned: bool = False,
    ) -> None:
        self.index = index
        self.now_s = now_s
        self.queues = queues
        self.preemptor = preemptor
        self.budget = budget
        self._publishes = publishes_when_planned
        self._block_size = queues.kv.block_size
        self.at: Request | None = None
        """The request being looked at: whom to blame if planning fails."""
        self.scheduled: list[tuple[Request, int]] = []
        self.cached_tokens = 0
        self.admitted_prompt_tokens = 0
        self.online_cached_tokens = 0
        self.online_admitted_prompt_tokens = 0

    @property
    def has_offline(self) -> bool:
        return any(not request.is_online for request, _ in self.scheduled)

    def add(self, request: Request, num_tokens: int) -> None:
        """Takes in a running request whose blocks are known to be available. It stays in the step from now on."""
        num_computed = request.num_computed_tokens
        if num_computed + num_tokens > len(request.block_ids) * self._block_size:
            self.queues.kv.grow(request, num_tokens)
        self.budget.add(num_tokens, num_computed)
        request.last_step = self.index
        self.scheduled.append((request, num_tokens))
        if self._publishes:
            self.queues.kv.publish(request, num_tokens)

    def admit(self, request: Request, hit: PrefixHit, num_tokens: int) -> None:
        """Starts a waiting request (already out of the pool, if offline) with its cached prefix."""
        self.queues.kv.admit(request, hit)
        self.queues.start(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = hit.num_tokens
            request.scheduled_s = self.now_s
            self.cached_tokens += hit.num_tokens
            self.admitted_prompt_tokens += request.num_prompt_tokens
            if request.is_online:
                self.online_cached_tokens += hit.num_tokens
                self.online_admitted_prompt_tokens += request.num_prompt_tokens
        self.add(request, num_tokens)

    def take_back(self, failed: Container[str] | None = None) -> set[Request]:
        """Undoes the publishing of planned tokens that were not computed; does nothing if none are published.

        Readers of such blocks in this step keep the part of their hit that is sound, and compute the rest again.

        Args:
            failed: ids of the requests of a step that ran which were not computed; None: the step did not run.

        Returns:
            Those readers: what the step computed for them is worth nothing.
        """
        readers: set[Request] = set()
        if not self._publishes:
            return readers
        kv, lost = self.queues.kv, set[int]()
        for request, num_tokens in self.scheduled:  # a reader stands behind those whose blocks it reads
            num_sound = next((i for i, block in enumerate(request.block_ids) if block in lost), None)
            if failed is not None and num_sound is None and request.request_id not in failed:
                continue
            # Progress is noted when the plan is made.
            num_before = request.num_computed_tokens - (0 if failed is None else num_tokens)
            lost.update(kv.retract(request, num_before))
            if num_sound is not None:
                kv.cut(request, num_sound)
                if request.num_preemptions == 0:
                    request.num_cached_tokens = request.num_computed_tokens
                readers.add(request)
        return readers

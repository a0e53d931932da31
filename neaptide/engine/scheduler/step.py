"""The step being planned."""

from neaptide.engine.kv.manager import PrefixHit
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.preemption import Preemptor
from neaptide.engine.scheduler.queues import Queues


class StepBuilder:
    """Who takes part with how many tokens; changes queues and block tables as it goes."""

    def __init__(self, index: int, now_s: float, queues: Queues, preemptor: Preemptor, budget: StepBudget) -> None:
        self.index = index
        self.now_s = now_s
        self.queues = queues
        self.preemptor = preemptor
        self.budget = budget
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
        """Takes in a running request whose blocks are known to be available."""
        self.queues.kv.grow(request, num_tokens)
        self.budget.add(num_tokens, request.num_computed_tokens)
        request.last_step = self.index
        self.scheduled.append((request, num_tokens))

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

"""A scheduling policy in a file of its own: the shortest prompt starts first.

From the directory of this file:

    neaptide serve --policy own_policy:ShortestFirst
"""

import math

from neaptide.policy import Draft, Request, Scheduler


def by_length(request: Request) -> tuple[int, float]:
    return request.num_prompt_tokens, request.arrival_s


class ShortestFirst(Scheduler):
    """What runs goes on. Then chats start, the shortest prompt first, and rows of batches only when no chat waits."""

    online_order = staticmethod(by_length)

    def pack(self, draft: Draft) -> float:
        running = [request for request in draft.all_running() if request.is_online or not self.offline_paused]
        while running and draft.budget.tokens_left:
            request = draft.at = running.pop(0)
            tokens = min(draft.kv.num_uncomputed(request), draft.budget.tokens_left)
            while not draft.kv.fits(draft.kv.blocks_needed(request, tokens)):
                victim = running.pop() if running else request
                draft.preempt(victim)  # the one that was admitted last
                if victim is request:
                    break
            else:
                draft.add(request, tokens)
        while not draft.preempted.total and (waiting := self.next_waiting(draft)) is not None:
            draft.at = waiting
            if not self.start(draft, waiting):
                break
        draft.at = None
        return math.inf  # a step may take as long as it takes

    def next_waiting(self, draft: Draft) -> Request | None:
        if draft.waiting_online:
            return draft.waiting_online[0]
        return None if self.offline_paused else draft.pool.peek()

    def start(self, draft: Draft, request: Request) -> bool:
        """Starts a waiting request if there are a slot, tokens and memory for all of its prompt."""
        hit = draft.kv.match_prefix(request)
        missing = request.num_known_tokens - hit.num_tokens
        has_slot = draft.num_running < self.config.max_num_seqs and draft.budget.tokens_left > 0
        if not has_slot or not draft.kv.fits(draft.kv.admission_cost(hit, missing)):
            return False
        draft.admit(request, hit, min(missing, draft.budget.tokens_left))
        return True

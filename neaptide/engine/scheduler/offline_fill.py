"""Filling what online work leaves of a step with offline work."""

from collections.abc import Callable, Container, Sequence
from itertools import takewhile

from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import HeadroomPredictor
from neaptide.engine.kv.draft import NO_HIT, PrefixHit
from neaptide.engine.kv.prefix_nodes import node_after
from neaptide.engine.request import Request, RequestStatus
from neaptide.engine.scheduler.budget import Reads
from neaptide.engine.scheduler.draft import Draft, Limit
from neaptide.engine.scheduler.queues import Reservation
from neaptide.engine.scheduler.residual import in_whole_tiles, num_paced
from neaptide.engine.steps.plan import BatchShape

GIANT_SHARE = 0.125
"""Fraction of the blocks that offline work may hold. A request that needs more and finds no room is passed by: others
run meanwhile."""
MAX_PASSED = 8
"""Most requests that are passed by in one step."""
PATIENCE_S = 30.0
"""Time in which the reservation for the first of them grows to all that it needs.

Nothing is reserved while online work alone leaves less than that, nor then for as long again as something was: blocks
are not kept in vain for more than half of the time.
"""


class OfflineFill:
    """Resident decodes, resident prompts, then the pool in its order, while time, tokens and blocks last.

    Resident requests need not take part: in a tight step they sit out and keep their KV, and the one that sat
    out longest is the first to come back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        headroom: HeadroomPredictor,
        is_worth_it: Callable[[Draft, int, int, Sequence[int]], bool],
        left_out: Container[str] = (),
    ) -> None:
        self._is_worth_it = is_worth_it
        """Whether computing so many tokens is worth what so many new blocks evict; the last are blocks of its hit."""
        self._config = config
        self._headroom = headroom
        self._keeps_headroom, self._passes_giants = "headroom" not in left_out, "giants" not in left_out
        self._may_sit_out = "sit-out" not in left_out
        self._giant = Reservation()
        """Reservation for the first request that was passed by and still waits."""

    def remember(self, draft: Draft, passed: Sequence[Request]) -> None:
        """A draft was applied that passed these requests by."""
        giant = self._giant.holder
        if giant is not None and giant.status is RequestStatus.WAITING:
            if not _leaves_room(draft, giant):
                self._giant.put_off(draft.now_s)
            return
        self._giant.holder = None
        if passed:
            self._giant.begin(passed[0], draft.now_s, PATIENCE_S)

    def fill(self, draft: Draft, limit_s: float) -> list[Request] | None:
        """Returns the requests that were passed by; None if the pool's turn did not come."""
        table = draft.table
        decodes = table.by_last_step(draft.due_decodes(online=False))
        prefills = table.requests_of(table.by_last_step(draft.prompt_rows(online=False)))
        contexts, count, reads = table.computed[decodes], len(decodes), None
        if self._may_sit_out and count:
            reads = Reads.of(contexts, draft.shared_tokens(decodes))
            count = draft.budget.most_decodes(
                contexts, limit_s, reads, lambda count: draft.shared_tokens(decodes[:count])
            )
        before = draft.budget.shape.copy()
        chosen = decodes
        if count < len(decodes):
            chosen, reads = decodes[: count if count or draft.num_parts else 1], None
        room = self._blocks_to_grow(draft)
        draft.add_decodes(chosen, lambda request: self._find_room(draft, request, 1), room, reads)
        if count < len(decodes):
            draft.offline_ended_by = _used_up(draft)
            return None
        self._pace(draft, before)
        for request in prefills:
            draft.at = request
            chunk = self._chunk(draft, request.num_uncomputed_tokens, request.num_computed_tokens, limit_s)
            if chunk == 0:
                draft.offline_ended_by = _used_up(draft)
                return None
            if draft.is_running(request) and self._find_room(draft, request, chunk):
                draft.add(request, chunk)
        draft.at = None
        passed: list[Request] = []
        while len(passed) < MAX_PASSED and self._admit_next(draft, limit_s, passed):
            pass
        return passed

    def _pace(self, draft: Draft, before: BatchShape) -> None:
        """Prompts get the tokens that belong to the decodes; else a step that computes follows on one that reads."""
        ends, density, budget = draft.pool.ends, draft.pool.target_density, draft.budget
        if ends is None or density is None:
            return
        paced = num_paced(ends, density, before, budget.shape, budget.least_s(), draft.pool.usual_step)
        budget.tokens_left = min(budget.tokens_left, in_whole_tiles(paced, budget.shape.num_tokens, ends.tile_tokens))

    def _chunk(
        self, draft: Draft, num_tokens: int, context_tokens: int, limit_s: float, swapped_blocks: int = 0
    ) -> int:
        """Tokens that fit; at least one in a step that is empty otherwise, so that offline work goes on."""
        chunk = draft.budget.largest_chunk(num_tokens, context_tokens, limit_s, swapped_blocks)
        return chunk if chunk or draft.num_parts else 1

    def _blocks_to_grow(self, draft: Draft) -> int:
        """Blocks that resident requests may still take. They may grow into the headroom: to drop them while blocks are
        free would only lose their KV, and online work takes them from it when it needs them. A lone one may take all,
        so that it comes to its end."""
        if draft.num_running_offline == 1:
            return draft.kv.available
        return min(draft.kv.available, self._most_blocks(draft) - draft.kv.pool.num_offline)

    def _blocks_to_admit(self, draft: Draft) -> int:
        """Blocks that may go to new requests: the headroom for online work stays free."""
        most = self.most_blocks_now(draft.now_s, draft.kv.pool.num_blocks)
        return min(draft.kv.available, most - draft.kv.pool.num_offline)

    def most_blocks_now(self, now_s: float, num_blocks: int) -> int:
        """Blocks that offline work may hold beside the headroom."""
        most = self._most_of(num_blocks)
        return min(most, num_blocks - self._headroom.headroom_blocks(now_s)) if self._keeps_headroom else most

    def _most_blocks(self, draft: Draft) -> int:
        """Blocks that offline work may hold, as configured."""
        return self._most_of(draft.kv.pool.num_blocks)

    def _most_of(self, num_blocks: int) -> int:
        return int(self._config.offline_max_kv_ratio * num_blocks)

    def _find_room(self, draft: Draft, request: Request, num_tokens: int) -> bool:
        """Whether a resident request can grow, younger ones dropped for it; else it sits out, and none is dropped."""
        needed = draft.kv.blocks_needed(request, num_tokens)
        missing = needed - self._blocks_to_grow(draft)
        if not needed or missing <= 0:
            return True
        younger = list(takewhile(lambda v: v.admission_index > request.admission_index, draft.offline_victims()))
        if draft.make_room(draft.kv.available + missing, younger):
            return True
        # Without all the others it would be alone, and might take all.
        is_oldest = len(younger) == draft.num_running_offline - 1
        return is_oldest and draft.make_room(needed, younger, slots=len(younger))

    def _admit_next(self, draft: Draft, limit_s: float, passed: list[Request]) -> bool:
        """Admits the next request, or passes a giant by; False if none may follow."""
        if draft.num_running >= self._config.max_num_seqs:
            draft.offline_ended_by = Limit.SEATS
            return False
        request = draft.at = draft.pool.peek()
        if request is None:
            draft.offline_ended_by = Limit.WORK
            return False
        hit = draft.kv.match_prefix(request)
        left = request.num_known_tokens - hit.num_tokens
        chunk = self._chunk(draft, left, hit.num_tokens, limit_s, len(hit.host_hashes))
        if chunk == 0 or _is_on_its_way(draft, request, hit):
            draft.offline_ended_by = _used_up(draft)
            return False
        # The whole prompt is reserved for, not only this chunk: half a prompt is of no use.
        cost = draft.kv.admission_cost(hit, left)
        is_alone = not draft.num_running_offline and not draft.waiting_online
        room = draft.kv.available if is_alone else self._blocks_to_admit(draft)
        if cost <= room - self._reserved_blocks(draft, request, passed):
            if is_alone or self._is_worth_it(draft, left, cost, hit.block_ids):
                draft.admit(request, hit, chunk)
                return True
            draft.offline_ended_by = Limit.MEMORY
            return False
        draft.offline_ended_by = Limit.MEMORY
        is_returned = draft.pool.ends is not None and request.num_preemptions > 0
        if not self._passes_giants or (cost < GIANT_SHARE * self._most_blocks(draft) and not is_returned):
            return False
        passed.append(request)
        draft.pool.pass_by()
        return True

    def _reserved_blocks(self, draft: Draft, request: Request, passed: list[Request]) -> int:
        """Blocks that others than the giant leave for it."""
        giant = self._giant.holder
        if giant is None or request is giant or giant not in passed or not _leaves_room(draft, giant):
            return 0
        kept = draft.kept_blocks[giant.request_id] = int(_blocks_of_all(draft, giant) * self._giant.part(draft.now_s))
        return kept


def _blocks_of_all(draft: Draft, request: Request) -> int:
    return draft.kv.admission_cost(NO_HIT, request.num_known_tokens)


def _leaves_room(draft: Draft, giant: Request) -> bool:
    """Whether the giant would fit beside what online work holds now, were it the only offline request."""
    return _blocks_of_all(draft, giant) <= draft.kv.pool.num_blocks - draft.kv.pool.num_online


def _is_on_its_way(draft: Draft, request: Request, hit: PrefixHit) -> bool:
    """Whether a request of this step goes on with what comes next of the prompt, and was only cut short by the step's
    end. Whoever begins now computes all that is left of the shared prefix a second time: blocks are found at admission.
    """
    prefix_node = node_after(request.prefix_nodes, hit.num_tokens, draft.kv.block_size)
    if prefix_node is None:
        return False
    unfinished = draft.unfinished_prompts(online=False)
    return any(prefix_node in other.prefix_nodes and draft.is_scheduled(other) for other in unfinished)


def _used_up(draft: Draft) -> Limit:
    return Limit.TIME if draft.budget.tokens_left > 0 else Limit.TOKENS

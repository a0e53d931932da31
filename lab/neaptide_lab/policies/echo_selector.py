"""Echo's BS+E+S and Echo itself: offline requests chosen by their benefit to the step, and a task-aware cache.

Source: Echo, sections 4 and 6. Each step starts from the requests of the last one and is changed in small moves: a
resident decode more, a prompt more, an offline request less. A plan is the step with one more request. The best one has
the most benefit minus punishment per second, equation 4. Benefit and punishment are tokens of weight one: tokens whose
KV the step produces, and tokens whose KV it evicts although a request still needs them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from neaptide.policy import Admit, BatchShape, CostModel, Draft, PrefixHit, Request, RequestClass
from neaptide_lab.policies.echo_bs_e import EchoBaseWithEstimator


@dataclass(slots=True, frozen=True)
class OfflinePlan:
    """The step with one more request from the pool."""

    request: Request
    hit: PrefixHit
    num_tokens: int
    """Tokens that the request computes."""
    benefit_tokens: int
    """Tokens of the whole step."""
    punishment_tokens: int
    """Punishment for this request."""
    seconds: float
    """Predicted time of the whole step."""

    @property
    def score(self) -> float:
        """Score by equation 4."""
        return (self.benefit_tokens - self.punishment_tokens) / self.seconds


def best_of(plans: list[OfflinePlan]) -> OfflinePlan:
    """The plan with the highest score; the first of equals."""
    return max(plans, key=lambda plan: plan.score)


def scores_without(draft: Draft, victims: list[Request], cost_model: CostModel) -> list[float]:
    """For each victim, equation 4 of the step in which all others are scheduled with one token. A victim's penalty is
    the KV that only it holds, which is computed again when it returns."""
    contexts = [draft.kv.num_computed(victim) + 1 for victim in victims]
    num_tokens, in_all, longest = draft.budget.shape.num_tokens + len(victims) - 1, sum(contexts), sorted(contexts)
    scores = []
    for victim, context in zip(victims, contexts, strict=True):
        shape = draft.budget.shape
        if len(victims) > 1:
            longest_left = longest[-2] if context == longest[-1] else longest[-1]
            shape = shape.plus_decodes(len(victims) - 1, in_all - context, longest_left)
        lost_tokens = context - 1 - draft.kv.block_size * _num_shared(draft, victim)
        scores.append((num_tokens - max(lost_tokens, 0)) / max(_seconds(cost_model, shape), 1e-9))
    return scores


def _num_shared(draft: Draft, request: Request) -> int:
    """Number of blocks that other requests hold as well."""
    return sum(draft.kv.pool.ref_cnt(block) > 1 for block in draft.kv.blocks_of(request))


def _seconds(cost_model: CostModel, shape: BatchShape) -> float:
    seconds, margin_s = cost_model.predict(shape)
    return seconds + margin_s


class EchoWithSelector(EchoBaseWithEstimator):
    """Policy ``bs+e+s``: bs+e with offline requests admitted and preempted by equation 4. The cache evicts by age."""

    follows_prefixes: ClassVar[bool] = True

    def _residents(self, draft: Draft) -> list[Request]:
        """Decodes, then started prompts; among each, those with the least KV to read first.

        If the slack does not suffice for all, that is the best score.
        """
        running = draft.running(RequestClass.OFFLINE)
        return sorted(running, key=lambda r: (r.num_uncomputed_tokens > 1, r.num_computed_tokens))

    def _admit_offline(self, draft: Draft, limit_s: float) -> bool:
        plans = self.plans(draft, limit_s)
        if not plans:
            return False
        best = best_of(plans)
        draft.at = best.request
        draft.admit(best.request, best.hit, best.num_tokens)
        return True

    # ---- the plan generator ----

    def plans(self, draft: Draft, limit_s: float) -> list[OfflinePlan]:
        """One plan for every length of the pool's requests, if it fits."""
        if draft.num_running >= self.config.max_num_seqs:
            return []
        found_tokens = sum(action.hit.num_tokens for action in draft.actions if isinstance(action, Admit))
        so_far_tokens = draft.budget.shape.num_tokens + found_tokens
        plans = [
            self._offline_plan(draft, request, hit, so_far_tokens, limit_s) for request, hit in self._candidates(draft)
        ]
        return [plan for plan in plans if plan is not None]

    def _candidates(self, draft: Draft) -> list[tuple[Request, PrefixHit]]:
        """For each length, the request that finds most of its prompt in the cache; nearly the same is computed for all
        others of it."""
        longest: dict[int, tuple[Request, PrefixHit]] = {}
        for bucket, request in draft.pool.heads():
            draft.at = request
            hit = draft.kv.match_prefix(request)
            if bucket not in longest or hit.num_tokens > longest[bucket][1].num_tokens:
                longest[bucket] = (request, hit)
            draft.at = None
        return list(longest.values())

    def _offline_plan(
        self, draft: Draft, request: Request, hit: PrefixHit, so_far_tokens: int, limit_s: float
    ) -> OfflinePlan | None:
        draft.at = request
        left = request.num_known_tokens - hit.num_tokens
        chunk = self._chunk(draft, left, hit.num_tokens, limit_s)
        if chunk == 0 or draft.kv.admission_cost(hit, left) > self._room_blocks(draft):
            return None
        num_new = -(-(hit.num_tokens + chunk) // draft.kv.block_size) - len(hit.block_ids)
        num_lost = draft.kv.num_wanted_evicted(num_new, set(hit.block_ids))
        return OfflinePlan(
            request,
            hit,
            chunk,
            so_far_tokens + hit.num_tokens + chunk,
            draft.kv.block_size * num_lost,
            _seconds(self.cost_model, draft.budget.shape.plus(chunk, hit.num_tokens)),
        )

    def _room_blocks(self, draft: Draft) -> int:
        """Blocks that a request from the pool may take."""
        return draft.kv.available

    # ---- dropping ----

    def _victims(self, draft: Draft, request: Request) -> Iterator[Request]:
        """Offline requests that may be preempted, so that the remaining score is the highest, then online ones, last
        first."""
        may_go = list(super()._victims(draft, request))
        offline = [victim for victim in may_go if not victim.is_online]
        scores = dict(zip(offline, scores_without(draft, offline, self.cost_model), strict=True))
        yield from sorted(offline, key=lambda victim: scores[victim], reverse=True)
        yield from (victim for victim in may_go if victim.is_online)


class Echo(EchoWithSelector):
    """Policy ``echo``: bs+e+s with the task-aware cache (section 4.2).

    Unneeded blocks are evicted first, then those of ended online requests, then those of offline requests by the number
    of requests that need them. Running requests keep theirs, and may hold all blocks but those forecast for online
    work.
    """

    evicts_by_reuse: ClassVar[bool] = True
    counts_reuse: ClassVar[bool] = True

    def _room_blocks(self, draft: Draft) -> int:
        """Applies the threshold on running requests, section 4.2. A lone request is exempt, as it would never run."""
        if not draft.num_running_offline:
            return draft.kv.available
        threshold = draft.kv.pool.num_blocks - self.headroom.headroom_blocks(draft.now_s)
        return min(draft.kv.available, threshold - draft.kv.pool.num_offline)

"""Turns of tenants, and of the lanes of each tenant."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from neaptide.engine.offline.lanes import Lane
from neaptide.engine.offline.sharing.tenant_account import Party, Turn
from neaptide.engine.offline.sharing.urgency import Urgency
from neaptide.engine.offline.turns import Look, Turns
from neaptide.engine.request import Request

LEAD_TOKENS = 1 << 18
"""Most tokens that a plan may admit for one tenant, or for one job of a tenant, ahead of another. That is a few seconds
of a GPU or a minute of a CPU. Over time each gets what its turns would have given it."""
LOOK_UP_S = 1.0
"""Time between two updates of the running answers' lengths, which take a little time for each."""


@dataclass(slots=True)
class HandedOut:
    """A request that has not ended."""

    request: Request
    lane: Lane
    answer_tokens: int
    """Answer tokens charged to its tenant: the expected ones, or its output if that is longer."""
    weight: float
    """Weight of its tenant when it was admitted, which divides all that it is charged for."""
    done_tokens: int = 0
    """Output tokens at the last update."""


class ByShares(Turns):
    """Order of the lanes: urgent jobs first, then tenants by their weights, and the lanes of a tenant by turns.

    A tenant is an API key's share of the offline work. Flex requests of a tenant count as one of its jobs.

    A request is charged when it is admitted, with its expected answer, and corrected when it ends. If it were charged
    at its end, long answers would fill every slot before the tenant was charged.

    Args:
        weights: of the tenants; 1 unless given.
        knows_urgency: False puts no job first.
    """

    def __init__(self, weights: Mapping[str, float], knows_urgency: bool = True) -> None:
        self._weights = dict(weights)
        self.shares = Party[str]()
        self.lanes: dict[str, Party[Lane]] = {}
        """Lanes of each tenant."""
        self._out: dict[str, HandedOut] = {}
        """Admitted requests that have not ended, by id."""
        self._answers: dict[str, tuple[int, int]] = {}
        """Number and tokens of ended answers, by tenant."""
        self._num_joined = 0
        self._numbers: dict[Lane, int] = {}
        """Arrival order of the lanes with requests."""
        self.urgency = Urgency(self._weights, self._numbers, knows_urgency)
        self._now_s = 0.0
        """When the last step was planned."""
        self._looked_up_s = -math.inf

    @property
    def rate_tokens_per_s(self) -> float | None:
        return self.urgency.rate_tokens_per_s

    def key(self, lane: Lane) -> Any:
        return self.urgency.place(lane), *self.shares.present.key(lane.share), *self.lanes[lane.share].present.key(lane)

    def look(self) -> "SharesAhead":
        return SharesAhead(self)

    # ---- lanes ----

    def join(self, lane: Lane) -> None:
        if self._now_s >= self._looked_up_s + LOOK_UP_S:
            self._looked_up_s = self._now_s
            self._look_up_answers()
        self._num_joined += 1
        self._numbers[lane] = self._num_joined
        party = self.lanes.setdefault(lane.share, Party())
        party.come(lane, (lane.is_job, self._num_joined))
        if lane.share not in self.shares.present:
            self.shares.come(lane.share, party.present.key(lane)[1:])
        self._place(lane.share)

    def leave(self, lane: Lane) -> None:
        party = self.lanes[lane.share]
        del self._numbers[lane]
        party.go(lane)
        self.urgency.leave(lane)
        if party.present.first is None:
            self.shares.go(lane.share)
        self._place(lane.share)

    def forget(self, lane: Lane) -> None:
        self.lanes[lane.share].forget(lane)

    def begin_step(self, now_s: float, is_paused: bool = False) -> None:
        self._now_s = now_s
        self.urgency.begin_step(now_s, is_paused)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        self._weights.clear()
        self._weights.update(weights)

    def _place(self, share: str) -> None:
        """Places a tenant by the first of its lanes, among tenants with as many quanta. The lane's own tokens do not
        count."""
        present = self.lanes[share].present
        if present.first is not None:
            self.shares.place(share, present.key(present.first)[1:])

    # ---- requests ----

    def took(self, lane: Lane, request: Request) -> None:
        answer_tokens = self.expected_answer(lane, request)
        weight = self.weight(lane.share)
        self._out[request.request_id] = HandedOut(request, lane, answer_tokens, weight)
        self.urgency.served(request.num_prompt_tokens)
        self.lanes[lane.share].hand_out(lane, request.num_prompt_tokens, answer_tokens)
        self.shares.hand_out(lane.share, request.num_prompt_tokens / weight, answer_tokens / weight)
        self._place(lane.share)

    def ended(self, request: Request) -> None:
        out = self._out.pop(request.request_id, None)
        if out is None:
            return
        share, weight, num_tokens = out.lane.share, out.weight, request.num_output_tokens
        self.urgency.served(num_tokens)
        self.lanes[share].end(out.lane, num_tokens, out.answer_tokens, out.done_tokens)
        self.shares.end(share, num_tokens / weight, out.answer_tokens / weight, out.done_tokens / weight)
        self._place(share)
        count, tokens = self._answers.get(share, (0, 0))
        self._answers[share] = count + 1, tokens + num_tokens

    def weight(self, share: str) -> float:
        return self._weights.get(share, 1.0)

    def expected_answer(self, lane: Lane, request: Request) -> int:
        """Expected tokens of an answer: the lane's mean, else its tenant's."""
        count, tokens = self._answers.get(lane.share, (0, 0))
        of_share = tokens // count if count else None
        return lane.expected_answer(request.params.max_tokens, of_share)

    def _look_up_answers(self) -> None:
        """Charges running answers for the tokens beyond their expected length."""
        for out in self._out.values():
            done = out.request.num_output_tokens
            if done == out.done_tokens:
                continue
            share, weight = out.lane.share, out.weight
            done_more, more = done - out.done_tokens, max(done - out.answer_tokens, 0)
            out.done_tokens, out.answer_tokens = done, out.answer_tokens + more
            self.lanes[share].go_on(out.lane, done_more, more)
            self.shares.go_on(share, done_more / weight, more / weight)
            if more:
                self._place(share)


class SharesAhead(Look):
    """``ByShares`` as it would be if what is looked at were handed out."""

    def __init__(self, turns: ByShares) -> None:
        self._turns = turns
        self._shares = turns.shares.ahead()
        self._lanes: dict[str, Turn[Lane]] = {}
        self._urgent = list(turns.urgency.places)

    def key(self, lane: Lane) -> Any:
        keys = self._shares.waiting.key(lane.share), self._lanes_of(lane.share).waiting.key(lane)
        return self._turns.urgency.place(lane), *keys[0], *keys[1]

    @property
    def first(self) -> Lane | None:
        if self._urgent:
            return self._urgent[0]
        share = self._shares.waiting.first
        return None if share is None else self._lanes_of(share).waiting.first

    def took(self, lane: Lane, request: Request) -> None:
        weight, answer_tokens = self._turns.weight(lane.share), self._turns.expected_answer(lane, request)
        self._lanes_of(lane.share).hand_out(lane, request.num_prompt_tokens, answer_tokens)
        self._shares.hand_out(lane.share, request.num_prompt_tokens / weight, answer_tokens / weight)
        self._place(lane.share)

    def drop(self, lane: Lane) -> None:
        if lane in self._urgent:
            self._urgent.remove(lane)
        self._lanes_of(lane.share).waiting.remove(lane)
        self._place(lane.share)

    def open_to_a_plan(self, lanes: Collection[Lane]) -> list[Lane]:
        """The most urgent job alone, if there is one; else all lanes that are not too far ahead of others.

        Only served tokens count. A plan knows how many long answers run at a time, and their rest exceeds the lead.
        """
        if self._urgent:
            return self._urgent[:1]
        of_share = {share: self._shares.served(share) for share in {lane.share for lane in lanes}}
        of_lane = {lane: self._lanes_of(lane.share).served(lane) for lane in lanes}
        least_of_share = min(of_share.values())
        least: dict[str, float] = {}
        for lane, tokens in of_lane.items():
            least[lane.share] = min(least.get(lane.share, math.inf), tokens)
        return [
            lane
            for lane, tokens in of_lane.items()
            if of_share[lane.share] <= least_of_share + LEAD_TOKENS and tokens <= least[lane.share] + LEAD_TOKENS
        ]

    def _lanes_of(self, share: str) -> Turn[Lane]:
        found = self._lanes.get(share)
        if found is None:
            found = self._lanes[share] = self._turns.lanes[share].ahead()
        return found

    def _place(self, share: str) -> None:
        waiting = self._lanes_of(share).waiting
        if waiting.first is None:
            self._shares.waiting.remove(share)
        else:
            self._shares.place(share, waiting.key(waiting.first)[1:])

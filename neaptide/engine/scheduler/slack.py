"""How long this step may take: the time budget that protects every online deadline."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from neaptide.engine.arrays import FloatArray, smallest
from neaptide.engine.config import SchedulerConfig
from neaptide.engine.interfaces import CostModel
from neaptide.engine.request import Request
from neaptide.engine.scheduler.budget import PromptSteps, Reads
from neaptide.engine.scheduler.cushion import LEAST_SHARE, Cushion
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.table import Streams

ITL_FACTOR = 1.5
"""A gap that streams cannot spare, or that offline work makes, is at most this many TPOT targets."""
STALL_FACTOR = 2.5
"""The same of a gap that online prompts make out of what streams have put by. A prompt that is one step instead of two
or three leaves sooner, and the next one finds it gone."""
PACE_SHARE = 0.9
"""Of the TPOT target: however many online prompts come, they may make a step so long whatever the streams can spare, so
that they always move. Below 1, so that streams still gain on their deadlines."""
DEMAND_WINDOW_S = 10.0
"""In which arrivals are counted: a longer one would still call it calm when the load has risen."""
MIN_DEMAND_WINDOW_S = 1.0
"""So many seconds stand for the time before, as long as less is known."""
CALM_SHARE, CROWDED_SHARE = 0.25, 0.75
"""Of the time that the running streams leave. While the prompts of late need no more than the first, one may stall the
streams up to the bound on a gap, for they will soon catch up; from the second on it keeps their pace. Between the two
the bound falls evenly: a threshold would make what a prompt gets hang on the last digit of a prediction."""
CUT_SHARE, WHOLE_SHARE = 0.3, 0.45
"""Of the TTFT target. Where a typical prompt and one of mean length behind it take no more than twice the first beside
the decodes of now, prompts are cut as streams like it: they are in time so. Where the two take twice the second in such
pieces they are not cut, for every piece pays for a step of its own. Long prompts among short ones, which seldom meet
their like, are cut. Between the two the bound rises evenly from that on a gap ..."""
WHOLE_CALM_SHARE = 0.5
"""... and so does what is calm, for many prompts are sooner done whole, and what late ones may take."""
WHOLE_CUSHION = 12.0
"""TPOT targets: where prompts are not cut streams keep in hand what the next one will cost them, up to this, which
streams of some thirty tokens gain. From there it falls evenly to nothing: what streams cannot spare is cut (ADR 54)."""
CATCH_UP_TOKENS = 8
"""No stall beyond the bound on a gap puts a stream further behind than it makes good with so many tokens: most answers
have them to come."""
MAX_STRETCH = 10.0
"""Of a prompt's prefill time by the decodes beside it."""
MAX_STEP_S = 5.0
"""No online prompt makes a step longer than this, or than half of the tightest TTFT target if that is more: whoever
cancels a request or asks for the batches' state waits for the end of a step. Longer ones are worth their wait only to
those who set a target to match: weights are read, and prompts gathered, less often."""
IDLE_SHARE, IDLE_SHARE_BESIDE = 0.5, 0.7
"""Of what the TTFT target leaves to a request that arrives in the middle of a step, less its prompt beside the decodes
of now: the rest is for a second arrival, and for steps that take longer than expected. Beside streams, which ask for
steps that are short as it is, it may be less."""
EGRESS_SHARE = 0.1
"""Of its TPOT target, the most that a stream keeps for its tokens' way out. That shifts the first token as well, so
only its wandering counts; and what is kept makes the first step of every stream shorter by all of it (ADR 53)."""
GIVEN_UP_FACTOR = 4.0
"""Times that bound at most, of a step that is given up when somebody comes (ADR 48)."""
MIN_IDLE_SHARE = 0.75
"""Of the TPOT target: the bound for requests that have not arrived yet never falls below it, because a machine too
slow for its TTFT target would otherwise never do offline work at all."""
LEAST_GAIN = 0.023
"""Of the time: what every step costs, whatever is in it, is no more than this of the longest that offline work makes
beside streams. Longer steps could gain no more than that, and make every stream slower ..."""
WORTH_SHARE = 0.2
"""... but so much of the TTFT target it may always take: where the TPOT target is short against that one, as most are,
it bounds a step sooner, and nothing is given away."""


def prefill_seconds(cost_model: CostModel, num_tokens: int, context_tokens: int) -> float:
    shape = BatchShape()
    shape.add(num_tokens, context_tokens)
    seconds, margin_s = cost_model.predict(shape)
    return seconds + margin_s


def decodes_shape(count: int, reads: Reads) -> BatchShape:
    """A step of so many decodes."""
    shape = BatchShape()
    shape.add_decodes(count, *reads)
    return shape


class StepBounds(NamedTuple):
    """Upper bounds on the step's duration, in seconds; infinite where nothing asks for one."""

    itl_s: float
    """The gap that running online streams may see; a longer one only where online prompts spend what streams have put
    by."""
    slack_s: float
    """What running online streams can spare before their next token is due."""
    idle_s: float
    """For the online request that arrives in the middle of the step. On what the step is expected to take: the other
    bounds hold for prediction and margin."""
    prompts_s: float
    """For online prompts: what the streams can spare, and more while few prompts come."""
    pace_s: float
    """What they may make a step in the long run, whatever the streams can spare for the moment ..."""
    late_prompts_s: float = math.inf
    """... and, within that, those of them that can no longer be in time: what streams have to spare is not for them."""
    worth_s: float = math.inf
    """Beside streams: beyond it offline work gains next to nothing. On what the step is expected to take, as
    ``idle_s``."""


class WholePrompt(NamedTuple):
    """A step with all of a typical prompt in it."""

    seconds: float
    margin_s: float
    need: float
    """How much the prompt needs to be whole so as to be in time: from 0, pieces will do, to 1."""


class SlackTracker:
    """Derives the bounds from deadlines, the cost model, and the prompts that arrived lately."""

    RECENT_ARRIVALS = 100

    def __init__(self, config: SchedulerConfig, cost_model: CostModel, left_out: Container[str] = ()) -> None:
        self._config = config
        self._bounds_idle, self._bounds_prefills = "idle-bound" not in left_out, "prefill-slack" not in left_out
        self._bounds_prompts, self._bounds_worth = "stream-slack" not in left_out, "worth-bound" not in left_out
        self._cushion = None if "cushion" in left_out else Cushion()
        self._cost_model = cost_model
        self.given_up_factor = GIVEN_UP_FACTOR
        self._arrivals: deque[tuple[int, float, float]] = deque(maxlen=self.RECENT_ARRIVALS)
        """Prompt tokens, TTFT target and time of each."""
        self._arrival_times_s: list[float] = []
        """Of these, in order ..."""
        self._tokens_before = [0]
        """... and the prompt tokens of all before each."""
        self._typical_prompt_tokens = 0
        """Of recent arrivals nine in ten have no longer prompt."""
        self._pair_share = 1.0
        """Half of what such a prompt and one of mean length take, over what it takes by itself."""
        self._tightest_ttft_s = config.ttft_slo_s

    def observe_arrival(self, request: Request) -> None:
        ttft_s = request.ttft_slo_s
        if ttft_s < self._config.ttft_slo_s and ttft_s <= prefill_seconds(self._cost_model, 1, 0):
            ttft_s = self._config.ttft_slo_s  # no step is so short: what it asks for is nobody's bound
        self._arrivals.append((request.num_prompt_tokens, ttft_s, request.arrival_s))
        by_time = sorted(self._arrivals, key=itemgetter(2))
        self._arrival_times_s = [arrival_s for *_, arrival_s in by_time]
        self._tokens_before = list(accumulate((tokens for tokens, *_ in by_time), initial=0))
        tokens = sorted(tokens for tokens, *_ in self._arrivals)
        self._typical_prompt_tokens = tokens[int(0.9 * (len(tokens) - 1))]
        self._pair_share = (1.0 + self._tokens_before[-1] / len(tokens) / self._typical_prompt_tokens) / 2
        self._tightest_ttft_s = min(self._config.ttft_slo_s, *(ttft_s for _, ttft_s, _ in self._arrivals))

    def observe_end(self, request: Request) -> None:
        """An online request has ended."""
        if self._cushion is not None and request.num_output_tokens > 1:
            self._cushion.observe_answer(request.num_output_tokens)

    def observe_dip(self, draft: Draft) -> None:
        if self._cushion is not None:
            self._cushion.observe(draft.now_s, draft.dip)

    def bounds(self, draft: Draft) -> StepBounds:
        streams = draft.streams()
        longest_s = self._longest_step_s()
        if not len(streams.rows):
            idle_s = self._idle_bound_s(IDLE_SHARE, 1.0)
            if draft.is_abortable:
                draft.arrival_waits_s = self._left_to_arrival_s(IDLE_SHARE, 1.0)
                idle_s = self._given_up_bound_s(draft, idle_s)
            return StepBounds(longest_s, math.inf, idle_s, longest_s, longest_s)
        decodes = decodes_shape(len(streams.rows), draft.stream_reads())
        alone_s = self._cost_model.predict(decodes).seconds
        tightest_s = smallest(streams.tpot_slo_s)
        if alone_s >= tightest_s:
            streams = streams.slower_than(alone_s)
            if not len(streams.rows):
                # Not even alone do these streams keep their pace: starving offline work would save no deadline.
                draft.dip, itl_s = 0.0, max(min(longest_s, ITL_FACTOR * tightest_s), ITL_FACTOR * alone_s)
                return StepBounds(itl_s, math.inf, self._idle_bound_s(IDLE_SHARE_BESIDE, MAX_STRETCH), itl_s, itl_s)
            tightest_s = smallest(streams.tpot_slo_s)  # nor does one of them, but the others do
        itl_s = min(longest_s, ITL_FACTOR * tightest_s)
        left_s = streams.due_s - self._way_out_s(streams.tpot_slo_s) - draft.now_s
        whole = self._whole_prompt(decodes, alone_s, itl_s)
        slack_s = prompts_slack_s = self._least_slack_s(left_s, streams, LEAST_SHARE)
        if self._cushion is not None:
            stall = whole.need * (whole.seconds - alone_s) / tightest_s
            share = max(self._cushion.share(draft.now_s), min(stall, 2.0 * WHOLE_CUSHION - stall))
            if share != LEAST_SHARE:
                slack_s = self._least_slack_s(left_s, streams, share)
        draft.dip = max(alone_s - slack_s, 0.0) / tightest_s
        behind_s = CATCH_UP_TOKENS * (tightest_s - alone_s)
        stall_s = min(smallest(left_s) + behind_s, longest_s)
        pace_s, late_prompts_s = self._paces_s(draft, whole, alone_s, tightest_s, itl_s, stall_s)
        stretch = 1.0 / max(1.0 - alone_s / max(pace_s, tightest_s), 1.0 / MAX_STRETCH)
        idle_s = self._idle_bound_s(IDLE_SHARE_BESIDE, stretch)
        worth_s = self._worth_bound_s(alone_s, min(itl_s, slack_s, idle_s))
        if not self._bounds_prompts:
            return StepBounds(itl_s, slack_s, idle_s, itl_s, itl_s, worth_s=worth_s)
        prompts_s = max(pace_s, min(prompts_slack_s, STALL_FACTOR * tightest_s, longest_s))
        return StepBounds(itl_s, slack_s, idle_s, prompts_s, pace_s, late_prompts_s, worth_s)

    def _way_out_s(self, tpot_slo_s: FloatArray) -> FloatArray:
        """Of a stream's tokens, so far as it has to be kept for."""
        way_s: FloatArray = np.minimum(self._config.delivery_latency_s, EGRESS_SHARE * tpot_slo_s)
        return way_s

    def _least_slack_s(self, left_s: FloatArray, streams: Streams, share: float) -> float:
        """Of streams with so much time left, beyond a cushion of so many TPOT targets."""
        if self._cushion is not None:
            left_s = left_s - self._cushion.in_hand(streams.num_output, share) * streams.tpot_slo_s
        return smallest(left_s)

    def prefill_slack_s(self, draft: Draft, unfinished: Iterable[Request]) -> float:
        """``min over i of (D_i - egress - t0 - W_i)``, W_i the prefill time left of i and of all before it.

        ``unfinished`` are online requests with prompt left after this step, in deadline order. One that can no
        longer make its deadline is relegated: it asks for nothing, and it is not ahead of the others.
        """
        slack_s, ahead_s = math.inf, 0.0
        for request in unfinished if self._bounds_prefills else ():
            left_s = self._prefill_s(draft, request)
            own_slack_s = request.next_deadline_s - self._config.delivery_latency_s - draft.now_s - left_s
            if own_slack_s > 0:
                slack_s = min(slack_s, max(own_slack_s - ahead_s, 0.0))
                ahead_s += left_s
        return slack_s

    def feasible(self, draft: Draft, prompts: Sequence[Request], pace_s: float) -> Iterator[bool]:
        """For each prompt, in deadline order, whether its first token can still be in time behind those before it
        that are, beside what is in the step by now. To begin takes a margin that to go on does not: what is half done
        is not given up for the noise of some steps.

        Args:
            pace_s: see ``StepBounds``.
        """
        if not prompts:
            return
        left = [draft.kv.num_uncomputed(request) for request in prompts]
        pace = PromptSteps.beside(draft.budget, pace_s, draft.kv.block_size, max(left))
        ahead, start_s = 0.0, draft.now_s + self._config.delivery_latency_s
        for request, num_tokens in zip(prompts, left, strict=True):
            steps = ahead + pace.of(num_tokens, draft.kv.num_computed(request))
            takes_s = pace.seconds(steps) + (0.0 if draft.is_running(request) else pace.most_late_s(steps))
            can_make_it = start_s + takes_s <= request.next_deadline_s
            if can_make_it:
                ahead = steps
            yield can_make_it

    def _whole_prompt(self, decodes: BatchShape, alone_s: float, itl_s: float) -> WholePrompt:
        """A typical one beside the streams' decodes, which take ``alone_s`` and may take ``itl_s``."""
        seconds, margin_s = self._cost_model.predict(decodes.plus(max(self._typical_prompt_tokens, 1), 0))
        in_pieces_s = (seconds - alone_s) / max(1.0 - alone_s / itl_s, 1.0 / MAX_STRETCH)
        need = (self._pair_share * in_pieces_s / self._tightest_ttft_s - CUT_SHARE) / (WHOLE_SHARE - CUT_SHARE)
        return WholePrompt(seconds, margin_s, min(max(need, 0.0), 1.0))

    def _paces_s(
        self, draft: Draft, whole: WholePrompt, alone_s: float, tightest_s: float, itl_s: float, stall_s: float
    ) -> tuple[float, float]:
        """How long online prompts may make a step though the streams cannot spare it, and how long late ones may.

        A stall for one that is late saves no deadline and costs streams theirs. Where prompts are not cut it is soon
        over, and the late one is out of the way of those that come after.

        Args:
            alone_s: what the streams' decodes take.
            tightest_s: the smallest of their TPOT targets.
            itl_s: the gap that all of them may see ...
            stall_s: ... and the one that they may for a prompt that would be late in pieces.
        """
        seconds, margin_s, need = whole
        calm_s = itl_s + need * max(min(seconds + margin_s, stall_s) - itl_s, 0.0)
        calm_share = CALM_SHARE + need * (WHOLE_CALM_SHARE - CALM_SHARE)
        crowd_share = self._prompt_demand(draft) / (1.0 - alone_s / tightest_s)
        crowd = (crowd_share - calm_share) / (CROWDED_SHARE - calm_share)
        least_s = PACE_SHARE * tightest_s
        pace_s = calm_s - min(max(crowd, 0.0), 1.0) * (calm_s - least_s)
        return pace_s, least_s + need * (pace_s - least_s)

    def _prompt_demand(self, draft: Draft) -> float:
        """Seconds of prefill that arrive in a second, of late. Where more prompts than that wait from before, they are
        as many again: a crowd is not over because nobody joins it."""
        num_recent, window_s = self._recent_arrivals(draft.now_s)
        if (num_waiting := len(draft.waiting_online)) > num_recent:
            num_tokens = self._tokens_before[-1] // len(self._arrivals)
            return num_waiting * prefill_seconds(self._cost_model, max(num_tokens, 1), 0) / DEMAND_WINDOW_S
        if not num_recent:
            return 0.0
        num_tokens = (self._tokens_before[-1] - self._tokens_before[-1 - num_recent]) // num_recent
        return num_recent * prefill_seconds(self._cost_model, max(num_tokens, 1), 0) / window_s

    def _recent_arrivals(self, now_s: float) -> tuple[int, float]:
        """How many have come of late, and in how many seconds."""
        if not self._arrivals:
            return 0, DEMAND_WINDOW_S
        num_recent = len(self._arrival_times_s) - bisect_right(self._arrival_times_s, now_s - DEMAND_WINDOW_S)
        # What came before the first arrival that is remembered is not known.
        return num_recent, min(DEMAND_WINDOW_S, max(now_s - self._arrivals[0][2], MIN_DEMAND_WINDOW_S))

    def _longest_step_s(self) -> float:
        return max(MAX_STEP_S, IDLE_SHARE * self._tightest_ttft_s)

    def _prefill_s(self, draft: Draft, request: Request) -> float:
        return prefill_seconds(self._cost_model, draft.kv.num_uncomputed(request), draft.kv.num_computed(request))

    def _idle_bound_s(self, share: float, stretch: float) -> float:
        """Half a wait that was only guessed needs no second reserve: it is for what a step is expected to take. On a
        noisy machine a margin would be a third of every step."""
        if not self._bounds_idle:
            return self._longest_step_s()
        return max(MIN_IDLE_SHARE * self._config.tpot_slo_s, self._left_to_arrival_s(share, stretch))

    def _left_to_arrival_s(self, share: float, stretch: float) -> float:
        """That bound where it must not be in vain: perhaps nothing, or less."""
        prefill_s = 0.0
        if self._typical_prompt_tokens:
            prefill_s = stretch * prefill_seconds(self._cost_model, self._typical_prompt_tokens, 0)
        bound_s = self._tightest_ttft_s - prefill_s - self._config.delivery_latency_s
        return share * bound_s / (1 + self._config.overlap_depth)

    def _worth_bound_s(self, alone_s: float, others_s: float) -> float:
        """How long a step beside streams may be before offline work gains next to nothing by a longer one; infinite
        where the least of the other bounds, ``others_s``, is as short.

        What every step costs is what two of half the tokens take more than one of all: reading the weights is no part
        of it where that is hidden behind so many. Where it is not, offline tokens are free beside the streams'
        decodes, so it may have as long as those take, ``alone_s``.
        """
        least_s = max(WORTH_SHARE * self._tightest_ttft_s, 2.0 * alone_s)
        if not self._bounds_worth or least_s >= others_s:
            return math.inf
        # A power of two: where tokens are computed in whole tiles, both have no part of one.
        half = 1 << max(self._config.max_num_batched_tokens.bit_length() - 2, 0)
        shape = BatchShape()
        shape.add(half, 0)
        each_s = 2.0 * self._cost_model.predict(shape).seconds
        shape.add(half, 0)
        each_s -= self._cost_model.predict(shape).seconds
        worth_s = max(least_s, each_s / LEAST_GAIN)
        return worth_s if worth_s < others_s else math.inf

    def _given_up_bound_s(self, draft: Draft, idle_s: float) -> float:
        """How long a step may take that is given up for whoever comes while more than what he can wait is left of it.

        What a step costs whatever is in it, c, and what is lost with those that are given up add up, of a step of L
        seconds with w left to wait and a arrivals a second, to c / L + a (L - w)^2 / 2 L: least at the root of
        w^2 + 2 c / a. Where nobody has come of late one might: who cancels something waits for the end of a step, too.
        """
        num_recent, window_s = self._recent_arrivals(draft.now_s)
        longest_s = self.given_up_factor * idle_s
        one_token = BatchShape()
        one_token.add(1, 0)
        each_s, waits_s = self._cost_model.predict(one_token).seconds, max(draft.arrival_waits_s, 0.0)
        return min(max(math.sqrt(waits_s**2 + 2.0 * each_s * window_s / max(num_recent, 1)), idle_s), longest_s)

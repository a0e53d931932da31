"""The plan of one step: how many tokens each request of vLLM may compute in it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

import numpy as np
from vllm.v1.request import Request

from neaptide.engine.arrays import IntArray
from neaptide.engine.deadlines import later_token_due_s
from neaptide.engine.interfaces import CostModel
from neaptide.engine.scheduler.budget import Reads, StepBudget
from neaptide.engine.scheduler.judged import Candidate
from neaptide.engine.table import Streams
from neaptide_vllm.scheduling.online import Online

WHOLE = 1 << 30
"""Grant of a request that may compute all that vLLM would."""

REQUEST_ID = attrgetter("request_id")
COMPUTED, TOTAL, NUM_PROMPT = map(attrgetter, ("num_computed_tokens", "num_tokens", "num_prompt_tokens"))
IN_FLIGHT, ELIGIBLE = attrgetter("num_output_placeholders"), attrgetter("next_decode_eligible_step")
MAX_TOKENS = attrgetter("max_tokens")


class Roster:
    """What does not change of running requests as long as they are the same ones, in columns.

    Args:
        running: vLLM's running requests.
        known: the online requests by id.
    """

    def __init__(self, running: Sequence[Request], known: Mapping[str, Online]) -> None:
        self.running = list(running)
        self.onlines = list(map(known.get, map(REQUEST_ID, running)))
        """[running] None for offline requests."""
        self.is_online = np.array([online is not None for online in self.onlines], np.bool_)
        self.tpot_slo_s = np.array([math.inf if online is None else online.tpot_slo_s for online in self.onlines])
        self.num_prompt, self.max_tokens = column(NUM_PROMPT, running), column(MAX_TOKENS, running)
        self.offline = [request for request, online in zip(running, self.onlines, strict=True) if online is None]
        self.nothing_granted = dict.fromkeys(map(REQUEST_ID, self.offline), 0)
        self.is_mixed = bool((self.is_online[1:] > self.is_online[:-1]).any())
        """Whether an online request stands behind an offline one."""


class Step:
    """Implements ``JudgedStep`` over vLLM's running requests, and collects what each may compute.

    Args:
        now_s: when the step begins.
        roster: vLLM's running requests.
        next_index: vLLM's number of the step; None if vLLM lets no request pause between two of its decodes.
    """

    is_abortable = False

    def __init__(
        self,
        now_s: float,
        roster: Roster,
        cost_model: CostModel,
        max_tokens: int,
        block_size: int,
        next_index: int | None,
    ) -> None:
        self.now_s, self.block_size = now_s, block_size
        self.budget = StepBudget(cost_model, max_tokens)
        self.candidates: list[Candidate] = []
        self.chosen: list[Candidate] = []
        self.num_parts = 0
        self.arrival_waits_s = math.inf
        self.offline_limit_s = 0.0
        """Longest step for offline requests that are admitted."""
        self.barred: set[str] = set()
        """Requests that were preempted for this step: they do not come back in it."""
        self.seconds_for: dict[str, float] = {}
        """Predicted seconds of the step by kind of work."""
        self._look_at(roster, next_index)

    def _look_at(self, roster: Roster, next_index: int | None) -> None:
        """Sorts the running requests into kinds of work. Leaves out those that vLLM passes by.

        Requests are read in columns: a loop over several hundred of them would take longer than all the planning.
        """
        running, is_online = roster.running, roster.is_online
        computed, total, in_flight = (column(read, running) for read in (COMPUTED, TOTAL, IN_FLIGHT))
        lacking = total + in_flight - computed
        is_last = (in_flight > 0) & (computed + 2 - in_flight >= roster.num_prompt + roster.max_tokens)
        is_open = (lacking > 0) & ~is_last
        if next_index is not None:
            is_open &= column(ELIGIBLE, running) <= next_index
        is_decode = is_open & (lacking == 1) & (computed > 0)

        self.offline = roster.offline
        """Running offline requests."""
        self.grants = roster.nothing_granted.copy()
        """Tokens of every online prompt and every running offline request. Online decodes are not here."""
        self.num_online = len(running) - len(self.offline)
        """Running online requests."""
        self.online_blocks = int((-(-computed[is_online] // self.block_size)).sum())
        """Blocks that they hold, of each kind of cache."""
        rows = (is_decode & ~is_online).nonzero()[0]
        self._offline_decodes = [running[row] for row in rows.tolist()]
        self._offline_contexts: IntArray = computed[rows]
        self.offline_prompts = [running[row] for row in (is_open & ~is_decode & ~is_online).nonzero()[0].tolist()]
        rows = (is_decode & is_online).nonzero()[0]
        self._decode_contexts: IntArray = computed[rows]
        self._spare_tokens = sum(len(running[row].spec_token_ids) for row in rows.tolist())
        """Tokens that online decodes compute beyond one each: drafts of speculation."""
        rows = (is_open & ~is_decode & is_online).nonzero()[0]
        self.online_prompts = [online for row in rows.tolist() if (online := roster.onlines[row]) is not None]
        num_output = total - roster.num_prompt + (in_flight > 0)
        rows = (is_open & is_online & (num_output > 0)).nonzero()[0]
        self._streams = self._streams_of(roster, rows, total[rows], num_output[rows])

    def _streams_of(self, roster: Roster, rows: IntArray, total: IntArray, num_output: IntArray) -> Streams:
        first_s = [online.first_token_s for row in rows.tolist() if (online := roster.onlines[row]) is not None]
        tpot_slo_s = roster.tpot_slo_s[rows]
        # A step in flight samples a first token that is not there yet.
        due_s = later_token_due_s(np.minimum(first_s, self.now_s), num_output, tpot_slo_s, np.zeros(len(rows)))
        return Streams(np.arange(len(rows)), total, num_output, tpot_slo_s, due_s)

    # ---- as a step that is judged ----

    def streams(self) -> Streams:
        return self._streams

    def stream_reads(self) -> Reads:
        return Reads.among(self.streams().total)

    def offline_contexts(self) -> IntArray:
        return self._offline_contexts

    # ---- building ----

    def mark(self, kind: str) -> None:
        """Notes what the step has become longer by since the last mark, as the time of this kind of work."""
        seconds = self.budget.prediction.seconds if self.num_parts else 0.0
        self.seconds_for[kind] = seconds - sum(self.seconds_for.values())

    def add_online_decodes(self) -> None:
        """Schedules all online decodes."""
        contexts = self._decode_contexts
        if not len(contexts):
            return
        self.budget.add_decodes(len(contexts) + self._spare_tokens, Reads.of(contexts))
        self.num_parts += len(contexts)

    def add(self, request: Request, num_tokens: int, context_tokens: int) -> None:
        """Schedules a prompt's chunk."""
        self.budget.add(num_tokens, context_tokens)
        self.grants[request.request_id] = num_tokens
        self.num_parts += 1

    def add_offline_decodes(self, limit_s: float, last_granted: Mapping[str, int]) -> bool:
        """Schedules as many running offline decodes as fit, least recently scheduled first. Returns whether all did.

        An otherwise empty step takes one, so that offline work goes on.
        """
        if not self._offline_decodes:
            return True
        contexts, decodes = self._offline_contexts, self._offline_decodes
        count = self.budget.most_decodes(contexts, limit_s)
        if count < len(decodes):
            order = sorted(range(len(decodes)), key=lambda row: last_granted.get(decodes[row].request_id, -1))
            decodes, contexts = [decodes[row] for row in order], contexts[order]
            count = self.budget.most_decodes(contexts, limit_s)
            if not count and not self.num_parts:
                count = 1
        if count:
            chosen = decodes[:count]
            drafts = sum(len(request.spec_token_ids) for request in chosen)
            self.budget.add_decodes(count + drafts, Reads.of(contexts[:count]))
            self.grants.update(dict.fromkeys(map(REQUEST_ID, chosen), WHOLE))
            self.num_parts += count
        return count == len(decodes)

    def offline_chunk(self, most_tokens: int, context_tokens: int) -> int:
        """Tokens of an offline prompt's next chunk; a block's worth at least in an otherwise empty step."""
        chunk = self.budget.largest_chunk(most_tokens, context_tokens, self.offline_limit_s)
        return chunk if chunk or self.num_parts else min(most_tokens, self.block_size)

    def granted_offline(self) -> Collection[str]:
        """Running offline requests that are scheduled."""
        grants = self.grants
        return [request_id for request_id in map(REQUEST_ID, self.offline) if grants[request_id]]


def column(read: Callable[[Request], int], requests: Sequence[Request]) -> IntArray:
    """[requests] what is read of each."""
    return np.fromiter(map(read, requests), np.int64, len(requests))

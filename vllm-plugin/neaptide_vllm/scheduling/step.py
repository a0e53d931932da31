"""The plan of one step: how many tokens each request of vLLM may compute in it."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from vllm.v1.request import Request

from neaptide.engine.arrays import FloatArray, IntArray
from neaptide.engine.deadlines import later_token_due_s
from neaptide.engine.interfaces import CostModel
from neaptide.engine.scheduler.budget import Reads, StepBudget
from neaptide.engine.scheduler.judged import Candidate
from neaptide.engine.table import Streams
from neaptide_vllm.scheduling.online import Online

WHOLE = 1 << 30
"""Grant of a request that may compute all that vLLM would."""


class Step:
    """Implements ``JudgedStep`` over vLLM's running requests, and collects what each may compute.

    Args:
        now_s: when the step begins.
        running: vLLM's running requests.
        known: the online requests by id.
        next_index: vLLM's number of the step.
    """

    is_abortable = False

    def __init__(
        self,
        now_s: float,
        running: Sequence[Request],
        known: Mapping[str, Online],
        cost_model: CostModel,
        max_tokens: int,
        block_size: int,
        next_index: int,
    ) -> None:
        self.now_s, self.block_size = now_s, block_size
        self.budget = StepBudget(cost_model, max_tokens)
        self.candidates: list[Candidate] = []
        self.chosen: list[Candidate] = []
        self.num_parts = 0
        self.arrival_waits_s = math.inf
        self.grants: dict[str, int] = {}
        """Tokens of every online prompt and every running offline request. Online decodes are not here."""
        self.offline_limit_s = 0.0
        """Longest step for offline requests that are admitted."""
        self.barred: set[str] = set()
        """Requests that were preempted for this step: they do not come back in it."""
        self.seconds_for: dict[str, float] = {}
        """Predicted seconds of the step by kind of work."""
        self.online_prompts: list[Online] = []
        """Running online requests that lack more than a token."""
        self.offline_prompts: list[Request] = []
        self.num_online = 0
        """Running online requests."""
        self.online_blocks = 0
        """Blocks that they hold, of each kind of cache."""
        self.is_mixed = False
        """Whether one of them stands behind an offline request."""
        self.offline: list[Request] = []
        """Running offline requests."""
        self._offline_decodes: list[Request] = []
        self._offline_contexts: list[int] = []
        self._decode_contexts: list[int] = []
        self._spare_tokens = 0
        """Tokens that online decodes compute beyond one each: drafts of speculation."""
        self._stream_rows: tuple[list[int], list[int], list[float], list[float]] = ([], [], [], [])
        self._streams: Streams | None = None
        self._look_at(running, known, next_index)

    def _look_at(self, running: Iterable[Request], known: Mapping[str, Online], next_index: int) -> None:
        """Sorts the running requests into kinds of work. Leaves out those that vLLM passes by."""
        totals, num_outputs, slos_s, firsts_s = self._stream_rows
        decode_contexts, block_size, now_s, grants = self._decode_contexts, self.block_size, self.now_s, self.grants
        num_online = online_blocks = spare_tokens = 0
        for request in running:
            request_id, computed = request.request_id, request.num_computed_tokens
            in_flight, total = request.num_output_placeholders, request.num_tokens
            lacking = total + in_flight - computed
            online = known.get(request_id)
            if online is None:
                self.offline.append(request)
                grants[request_id] = 0
            else:
                num_online += 1
                online_blocks += -(-computed // block_size)
                self.is_mixed |= bool(self.offline)
            if lacking <= 0 or request.next_decode_eligible_step > next_index:
                continue
            num_prompt = request.num_prompt_tokens
            if in_flight and computed + 2 - in_flight >= num_prompt + request.max_tokens:
                continue  # its last token is in flight
            is_decode = lacking == 1 and computed > 0
            if online is None:
                if is_decode:
                    self._offline_decodes.append(request)
                    self._offline_contexts.append(computed)
                else:
                    self.offline_prompts.append(request)
                continue
            num_output = total - num_prompt + (in_flight > 0)
            if num_output > 0:
                totals.append(total)
                num_outputs.append(num_output)
                slos_s.append(online.tpot_slo_s)
                first_s = online.first_token_s
                firsts_s.append(first_s if first_s < math.inf else now_s)
            if is_decode:
                decode_contexts.append(computed)
                spare_tokens += len(request.spec_token_ids)
            else:
                self.online_prompts.append(online)
        self.num_online, self.online_blocks, self._spare_tokens = num_online, online_blocks, spare_tokens

    # ---- as a step that is judged ----

    def streams(self) -> Streams:
        if self._streams is None:
            totals, num_outputs, slos_s, firsts_s = self._stream_rows
            num_output: IntArray = np.array(num_outputs, np.int64)
            tpot_slo_s: FloatArray = np.array(slos_s)
            due_s = later_token_due_s(np.array(firsts_s), num_output, tpot_slo_s, np.zeros(len(totals)))
            self._streams = Streams(np.arange(len(totals)), np.array(totals, np.int64), num_output, tpot_slo_s, due_s)
        return self._streams

    def stream_reads(self) -> Reads:
        return Reads.among(self.streams().total)

    def offline_contexts(self) -> IntArray:
        return np.array(self._offline_contexts, np.int64)

    # ---- building ----

    def mark(self, kind: str) -> None:
        """Notes what the step has become longer by since the last mark, as the time of this kind of work."""
        seconds = self.budget.prediction.seconds if self.num_parts else 0.0
        self.seconds_for[kind] = seconds - sum(self.seconds_for.values())

    def add_online_decodes(self) -> None:
        """Schedules all online decodes."""
        if not self._decode_contexts:
            return
        contexts = np.array(self._decode_contexts, np.int64)
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
        contexts = self.offline_contexts()
        count, decodes = self.budget.most_decodes(contexts, limit_s), self._offline_decodes
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
            self.grants.update((request.request_id, WHOLE) for request in chosen)
            self.num_parts += count
        return count == len(decodes)

    def offline_chunk(self, most_tokens: int, context_tokens: int) -> int:
        """Tokens of an offline prompt's next chunk; a block's worth at least in an otherwise empty step."""
        chunk = self.budget.largest_chunk(most_tokens, context_tokens, self.offline_limit_s)
        return chunk if chunk or self.num_parts else min(most_tokens, self.block_size)

    def granted_offline(self) -> Collection[str]:
        """Running offline requests that are scheduled."""
        return [request.request_id for request in self.offline if self.grants[request.request_id]]

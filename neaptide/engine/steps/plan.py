"""Interface between scheduler and executor: a step's plan, its cost features, its result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from neaptide.engine.arrays import BoolArray, IntArray
from neaptide.engine.kv.slot_copies import SlotCopies
from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import SamplingParams
from neaptide.engine.table import RequestTable


@dataclass(slots=True)
class BatchShape:
    """Cost features of a step. They are running sums, so adding a candidate is O(1).

    A request that computes one token after cached context counts as decode, anything else as prefill.
    """

    prefill_tokens: int = 0
    prefill_attention_pairs: int = 0
    """Sum over prefill chunks of (query, key) pairs: n*c + n*(n+1)/2 for n tokens on a context of c."""
    prefill_requests: int = 0
    decode_requests: int = 0
    decode_context_tokens: int = 0
    """Sum of the KV tokens that decodes read."""
    max_context_tokens: int = 0
    shared_prefix_tokens: int = 0
    """KV tokens that decodes need not read, because one read of a shared prefix serves several of them (0 without a
    kernel that shares reads)."""
    swapped_blocks: int = 0
    prefill_context_tokens: int = 0
    """Sum of the KV tokens that prefill chunks read, which is the context before them."""
    prefill_masked_pairs: int = 0
    """Sum of n*(n-1)/2 over chunks of n tokens after context: pairs that a kernel without causal tiles computes and
    discards."""
    longest_decode_tokens: int = 0
    """KV tokens that the longest decode reads."""
    copied_aside_blocks: int = 0
    """Single slots copied to or from host memory, in blocks. The step waits for them, unless its device copies while
    it computes."""

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_requests

    def add(self, num_tokens: int, context_tokens: int) -> None:
        """Adds a request that computes ``num_tokens`` after ``context_tokens`` in the cache."""
        if num_tokens == 1 and context_tokens > 0:
            self.decode_requests += 1
            self.decode_context_tokens += context_tokens + 1
            if context_tokens >= self.longest_decode_tokens:
                self.longest_decode_tokens = context_tokens + 1
        else:
            self.prefill_requests += 1
            self.prefill_tokens += num_tokens
            self.prefill_context_tokens += context_tokens
            if context_tokens > 0:
                self.prefill_masked_pairs += num_tokens * (num_tokens - 1) // 2
            self.prefill_attention_pairs += num_tokens * context_tokens + num_tokens * (num_tokens + 1) // 2
        if context_tokens + num_tokens > self.max_context_tokens:
            self.max_context_tokens = context_tokens + num_tokens

    def plus(self, num_tokens: int, context_tokens: int) -> "BatchShape":
        """A copy with one more request."""
        other = self.copy()
        other.add(num_tokens, context_tokens)
        return other

    def add_decodes(self, count: int, context_tokens: int, longest_tokens: int, shared_tokens: int = 0) -> None:
        """Adds ``count`` decodes that read ``context_tokens`` in total; the longest reads ``longest_tokens``.

        Shared reads save ``shared_tokens`` of them.
        """
        self.decode_requests += count
        self.decode_context_tokens += context_tokens
        self.shared_prefix_tokens += shared_tokens
        if longest_tokens > self.longest_decode_tokens:
            self.longest_decode_tokens = longest_tokens
        if longest_tokens > self.max_context_tokens:
            self.max_context_tokens = longest_tokens

    def plus_decodes(
        self, count: int, context_tokens: int, longest_tokens: int, shared_tokens: int = 0
    ) -> "BatchShape":
        """A copy after ``add_decodes``."""
        other = self.copy()
        other.add_decodes(count, context_tokens, longest_tokens, shared_tokens)
        return other

    def copy(self) -> "BatchShape":
        return BatchShape(
            self.prefill_tokens,
            self.prefill_attention_pairs,
            self.prefill_requests,
            self.decode_requests,
            self.decode_context_tokens,
            self.max_context_tokens,
            self.shared_prefix_tokens,
            self.swapped_blocks,
            self.prefill_context_tokens,
            self.prefill_masked_pairs,
            self.longest_decode_tokens,
            self.copied_aside_blocks,
        )


class NewRequest(msgspec.Struct, frozen=True):
    """Sent with the first step that schedules the request; the executor keeps it until the request ends."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step, for executors that handle requests one by one."""

    request_id: str
    token_ids: list[int]
    """Tokens to compute, from position ``num_computed_tokens`` on. ``PLACEHOLDER_TOKEN_ID`` stands for the token that
    the step before samples."""
    num_computed_tokens: int
    """Tokens whose KV is in the cache before this step."""
    block_ids: list[int]
    """The request's whole block table; covers ``num_computed_tokens + len(token_ids)`` tokens."""
    sample: bool
    """Whether the last position's logits give a new token."""
    output_position: int
    """Index of that new token in the request's output (key of its random stream)."""


@dataclass(slots=True)
class StepPlan:
    """A step: the slots of the request table that compute, their token counts, and what changed. No tensors.

    The arrays have one entry per part, in the step's order. Token ids and block tables are in ``table``. The executor
    must read them in ``submit``, because later the slots may belong to other requests.
    """

    step: int
    shape: BatchShape
    table: RequestTable
    rows: IntArray
    num_tokens: IntArray
    num_computed: IntArray
    """Tokens whose KV is in the cache before this step."""
    sample: BoolArray
    """Whether the last position's logits give a new token."""
    output_position: IntArray
    """Index of that new token in the request's output (key of its random stream)."""
    new_requests: list[NewRequest] = field(default_factory=list)
    finished_ids: list[str] = field(default_factory=list)
    """Requests that ended since the last plan; the executor drops their state."""
    preempted_ids: list[str] = field(default_factory=list)
    """Requests that lost their KV since the last plan."""
    resumed_ids: list[str] = field(default_factory=list)
    """Requests of this step that lost their KV earlier."""
    zero_blocks: list[int] = field(default_factory=list)
    """Blocks with non-finite values, to be overwritten before the step writes to any block. If the plan is run in
    parts, the first submission has done this."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    """Copies (block, host slot) to host memory, to be made before anything is written. If the plan is run in parts, the
    first submission has made them."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Copies (host slot, block) from host memory, to be made after ``saves`` and before anything is computed. If the
    plan is run in parts, every part makes them again, which is harmless."""
    slot_copies: SlotCopies | None = None
    """Copies of single slots, to be made after ``saves`` and ``loads`` and before anything is computed. If the plan is
    run in parts, the first submission has made them."""
    predicted_s: float = 0.0
    margin_s: float = 0.0
    budget_s: float = 0.0
    mask_limit_s: float = math.inf
    """Longest wait for grammar masks when the step could otherwise sample, in seconds. A request whose mask is later
    samples nothing (``StepResult.late``)."""
    abortable_share: float = 0.0
    """Share of the layers during which an online arrival aborts the step; 0 if it cannot be aborted. Its results are
    then dropped, and its requests compute the same tokens again. Later arrivals wait for its end. Such a step has
    nothing to copy."""
    is_continued: bool = False
    """Whether every part is a decode of a request with output: no prompt is computed, and no token is a first one."""
    _request_ids: list[str] | None = None
    _ends: IntArray | None = None

    @property
    def ends(self) -> IntArray:
        """[parts] tokens whose KV is in the cache after the step."""
        if self._ends is None:
            self._ends = self.num_computed + self.num_tokens
        return self._ends

    @property
    def request_ids(self) -> list[str]:
        """[parts]; to be read before another step is planned, because the slots may belong to other requests then."""
        if self._request_ids is None:
            ids = self.table.ids
            self._request_ids = [ids[row] for row in self.rows.tolist()]
        return self._request_ids

    @classmethod
    def of_parts(
        cls,
        step: int,
        parts: Sequence[ScheduledRequest],
        new_requests: Sequence[NewRequest] = (),
        finished_ids: Sequence[str] = (),
    ) -> "StepPlan":
        """A plan with a table of its own, for calibration, warm-up and tests."""
        ends = [part.num_computed_tokens + len(part.token_ids) for part in parts]
        width = max([1, *ends, *(len(part.block_ids) for part in parts)])
        table, shape = RequestTable(max(len(parts), 1), width, block_size=1), BatchShape()
        for row, (part, end) in enumerate(zip(parts, ends, strict=True)):
            table.ids[row] = part.request_id
            table.tokens[row, part.num_computed_tokens : end] = part.token_ids
            table.blocks.append(row, part.block_ids)
            shape.add(len(part.token_ids), part.num_computed_tokens)
        starts = np.array([part.num_computed_tokens for part in parts], np.int64)
        return cls(
            step,
            shape,
            table,
            rows=np.arange(len(parts)),
            num_tokens=np.array(ends, np.int64) - starts,
            num_computed=starts,
            sample=np.array([part.sample for part in parts], np.bool_),
            output_position=np.array([part.output_position for part in parts], np.int64),
            new_requests=list(new_requests),
            finished_ids=list(finished_ids),
        )

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def scheduled(self) -> list[ScheduledRequest]:
        """The parts as objects, made at every call; to be called in ``submit`` only."""
        table = self.table
        columns = zip(
            self.request_ids,
            self.rows.tolist(),
            self.num_computed.tolist(),
            self.num_tokens.tolist(),
            self.sample.tolist(),
            self.output_position.tolist(),
            strict=True,
        )
        return [
            ScheduledRequest(
                request_id,
                table.tokens[row, start : start + count].tolist(),
                start,
                table.blocks.blocks(row),
                *sampling,
            )
            for request_id, row, start, count, *sampling in columns
        ]

    def part(self, indices: IntArray) -> "StepPlan":
        """The plan for the parts at ``indices``."""
        ids = [self.request_ids[i] for i in indices.tolist()]
        named = set(ids)
        return StepPlan(
            self.step,
            _shape_of(self.num_tokens[indices], self.num_computed[indices]),
            self.table,
            self.rows[indices],
            self.num_tokens[indices],
            self.num_computed[indices],
            self.sample[indices],
            self.output_position[indices],
            [new for new in self.new_requests if new.request_id in named],
            self.finished_ids,
            self.preempted_ids,
            [request_id for request_id in self.resumed_ids if request_id in named],
            loads=self.loads,
            _request_ids=ids,
        )

    def cut(self, indices: IntArray, num_tokens: IntArray, num_computed: IntArray) -> "StepPlan":
        """A plan that computes a piece of some parts; it introduces no requests and copies no blocks.

        Args:
            indices: [cut parts] the parts.
            num_tokens: [cut parts] tokens to compute.
            num_computed: [cut parts] tokens computed before. A part samples only with its last token.
        """
        return StepPlan(
            self.step,
            _shape_of(num_tokens, num_computed),
            self.table,
            self.rows[indices],
            num_tokens,
            num_computed,
            self.sample[indices] & (num_computed + num_tokens == self.ends[indices]),
            self.output_position[indices],
            mask_limit_s=self.mask_limit_s,
            abortable_share=self.abortable_share,
            _request_ids=[self.request_ids[i] for i in indices.tolist()],
        )


def _shape_of(num_tokens: IntArray, num_computed: IntArray) -> BatchShape:
    shape = BatchShape()
    for count, context in zip(num_tokens.tolist(), num_computed.tolist(), strict=True):
        shape.add(count, context)
    return shape


@dataclass(slots=True)
class StepResult:
    token_ids: IntArray
    """[parts] the new token of every part that sampled and did not fail; other entries are undefined."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    """Log-probabilities by request id, for requests that asked for them."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Prompt log-probabilities by request id, for requests that asked for them. One entry per position p of this step
    with p + 1 < len(prompt), which scores prompt token p + 1."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed by themselves (for example non-finite logits); they have no token here."""
    late: dict[str, float] = field(default_factory=dict)
    """Requests whose masks were late, and the seconds for which they should not run. They have no token here, and
    compute their last one again."""
    prepare_s: float = 0.0
    model_s: float = 0.0
    sample_s: float = 0.0
    mask_s: float = 0.0
    """Part of ``sample_s`` spent waiting for masks."""
    grammar_bytes: int = 0
    """Host memory that grammars take, roughly."""
    is_whole: bool = True
    """False: the step was run in parts, so its time is not comparable."""
    memory_ran_out: int = 0
    """Number of times that device memory ran out. The executor then computed in smaller pieces."""
    is_aborted: bool = False
    """Whether an online arrival aborted the step (``StepPlan.abortable_share``). Nothing of it counts."""

    @classmethod
    def of(cls, plan: StepPlan) -> "StepResult":
        """An empty result for the plan."""
        return cls(np.zeros(len(plan), np.int64))

    def tokens_by_id(self, plan: StepPlan) -> dict[str, int]:
        """The new token of every request of the plan that has one."""
        sampled = np.flatnonzero(plan.sample).tolist()
        ids = plan.request_ids
        return {ids[i]: int(self.token_ids[i]) for i in sampled if ids[i] not in self.errors}

    def merge(self, part: "StepResult", indices: IntArray) -> None:
        """Adds the result of a part of the step."""
        self.token_ids[indices] = part.token_ids
        self.logprobs |= part.logprobs
        self.prompt_logprobs |= part.prompt_logprobs
        self.errors |= part.errors
        self.late |= part.late
        self.prepare_s += part.prepare_s
        self.model_s += part.model_s
        self.sample_s += part.sample_s

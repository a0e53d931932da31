"""What passes between scheduler and executor: the plan of a step, its cost features, its result."""

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
    """Cost features of a step: running sums, so that adding a candidate is O(1).

    A request that computes one token on top of cached context counts as decode, anything else as prefill.
    """

    prefill_tokens: int = 0
    prefill_attention_pairs: int = 0
    """Sum over prefill chunks of (query, key) pairs: n*c + n*(n+1)/2 for n tokens on a context of c."""
    prefill_requests: int = 0
    decode_requests: int = 0
    decode_context_tokens: int = 0
    """KV tokens read by decodes, summed."""
    max_context_tokens: int = 0
    shared_prefix_tokens: int = 0
    """KV tokens that several readers share and a kernel reads once (0 without such a kernel)."""
    swapped_blocks: int = 0
    prefill_context_tokens: int = 0
    """KV tokens that prefill chunks read: the context before them, summed."""
    prefill_masked_pairs: int = 0
    """n*(n-1)/2 for every chunk of n tokens behind context: pairs that a kernel without causal tiles computes as well,
    to throw them away."""
    longest_decode_tokens: int = 0
    """KV tokens that the longest decode reads."""
    copied_aside_blocks: int = 0
    """Slots copied to host memory or from it beside the step's work, in blocks: they cost what they take longer."""

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_requests

    def add(self, num_tokens: int, context_tokens: int) -> None:
        """Adds a request that computes ``num_tokens`` on top of ``context_tokens`` already in the cache."""
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

    def add_decodes(self, count: int, context_tokens: int, longest_tokens: int) -> None:
        """Adds ``count`` decodes that read ``context_tokens`` in all, the longest of them ``longest_tokens``."""
        self.decode_requests += count
        self.decode_context_tokens += context_tokens
        if longest_tokens > self.longest_decode_tokens:
            self.longest_decode_tokens = longest_tokens
        if longest_tokens > self.max_context_tokens:
            self.max_context_tokens = longest_tokens

    def plus_decodes(self, count: int, context_tokens: int, longest_tokens: int) -> "BatchShape":
        """A copy with ``add_decodes`` done."""
        other = self.copy()
        other.add_decodes(count, context_tokens, longest_tokens)
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
    """Sent with the first step that a request takes part in; the executor keeps it until the request ends."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part in a step, taken out of the table: for executors that go through requests one by one."""

    request_id: str
    token_ids: list[int]
    """The tokens to compute, at positions ``num_computed_tokens ...``; ``PLACEHOLDER_TOKEN_ID`` is the token that the
    request samples in the step submitted before."""
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
    """A step: which rows of the request table compute how many tokens, and what changed. No tensors.

    The arrays have one entry per part, in the step's order. Token ids and block tables stand in ``table``; what an
    executor wants of them it reads in ``submit``, for the rows may belong to other requests later.
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
    """Requests that ended since the last plan: the executor drops what it keeps of them."""
    preempted_ids: list[str] = field(default_factory=list)
    """Requests that lost their KV since the last plan ..."""
    resumed_ids: list[str] = field(default_factory=list)
    """... and those of this step that had lost it before."""
    zero_blocks: list[int] = field(default_factory=list)
    """Blocks that held what is not finite: to be overwritten before the step writes to any. Of a plan that is run in
    parts, its first submission has done that."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to be copied to slots of host memory before anything is written ..."""
    loads: list[tuple[int, int]] = field(default_factory=list)
    """... and then slots of host memory to be copied to blocks before anything is computed. Of a plan that is run in
    parts, every part loads again, which changes nothing, and its first submission has saved."""
    slot_copies: SlotCopies | None = None
    """Single slots to be copied, behind ``saves`` and ``loads`` and before anything is computed. Of a plan that is run
    in parts, its first submission has done that."""
    predicted_s: float = 0.0
    margin_s: float = 0.0
    budget_s: float = 0.0
    mask_limit_s: float = math.inf
    """So long does the step wait for masks of grammars when it could sample without them. Where one is not there by
    then its request samples nothing (``StepResult.late``)."""
    give_up_share: float = 0.0
    """While this share of its layers is computed, it is given up for an online request that comes: the rest is dropped,
    and its rows compute the same again. Who comes later waits for its end. It has nothing to copy."""
    is_continued: bool = False
    """Every part puts out a token behind others of its answer: no prompt is computed, and no token is a first one."""
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
        """[parts]; first asked for before another step is planned, for the rows may belong to other requests then."""
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
        """A plan made by hand, on a table of its own: for calibration, warm-up and tests."""
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
        """The parts, made anew at every call; to be asked for in ``submit`` only."""
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
        """The plan for some of its parts."""
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
        """What is to be computed of some of its parts, and nothing else: requests are made known and blocks copied.

        Args:
            indices: [cut parts] the parts.
            num_tokens: [cut parts] of each.
            num_computed: [cut parts] tokens before those; only where they end with the part is there a new token.
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
            give_up_share=self.give_up_share,
            _request_ids=[self.request_ids[i] for i in indices.tolist()],
        )


def _shape_of(num_tokens: IntArray, num_computed: IntArray) -> BatchShape:
    shape = BatchShape()
    for count, context in zip(num_tokens.tolist(), num_computed.tolist(), strict=True):
        shape.add(count, context)
    return shape


@dataclass(slots=True)
class StepResult:
    """What came out of a step."""

    token_ids: IntArray
    """[parts] the new token of every part that sampled and did not fail; the others' entries mean nothing."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    """For requests that asked for them."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """For requests that asked for them: one entry per position p of this step with p + 1 < len(prompt),
    each scoring prompt token p + 1."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed on their own (for example non-finite logits); they have no token here."""
    late: dict[str, float] = field(default_factory=dict)
    """Requests whose masks were not there in time, and for how many seconds there is no use in running them. They have
    no token here, and compute their last one again."""
    prepare_s: float = 0.0
    model_s: float = 0.0
    sample_s: float = 0.0
    mask_s: float = 0.0
    """The part of ``sample_s`` that was spent waiting for masks."""
    grammar_bytes: int = 0
    """Host memory that grammars take, about."""
    is_whole: bool = True
    """False: the step had to be run in parts, so its time says nothing."""
    memory_ran_out: int = 0
    """Times that there was too little memory for what was to be computed at once. The executor went on in pieces."""
    is_given_up: bool = False
    """An online request came, and nothing of the step counts (``StepPlan.give_up_share``)."""

    @classmethod
    def of(cls, plan: StepPlan) -> "StepResult":
        """Room for the plan's tokens."""
        return cls(np.zeros(len(plan), np.int64))

    def tokens_by_id(self, plan: StepPlan) -> dict[str, int]:
        """The new token of every request of the plan that has one."""
        sampled = np.flatnonzero(plan.sample).tolist()
        ids = plan.request_ids
        return {ids[i]: int(self.token_ids[i]) for i in sampled if ids[i] not in self.errors}

    def merge(self, part: "StepResult", indices: IntArray) -> None:
        """Takes in the result of a part of the step."""
        self.token_ids[indices] = part.token_ids
        self.logprobs |= part.logprobs
        self.prompt_logprobs |= part.prompt_logprobs
        self.errors |= part.errors
        self.late |= part.late
        self.prepare_s += part.prepare_s
        self.model_s += part.model_s
        self.sample_s += part.sample_s

"""One request inside the engine, and its status."""

import math
from enum import IntEnum

import numpy as np

from neaptide.engine.arrays import TokenArray
from neaptide.engine.deadlines import first_token_due_s, later_token_due_s
from neaptide.engine.kv.prefix_nodes import Path
from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import RequestClass, SamplingParams, Tier, request_class
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID, RequestTable


class RequestStatus(IntEnum):
    WAITING = 0
    RUNNING = 1
    """Holds a slot and may hold KV blocks; each step decides whether it is scheduled."""
    FINISHED = 2


class Request:
    """State of one request. ``num_computed_tokens`` is the one progress counter: there are no phases.

    While the request runs, the values that change at each step are in its slot of the ``RequestTable``. This is a view
    on it.
    """

    __slots__ = (
        "_first_token_s",
        "_output_token_ids",
        "admission_index",
        "arrival_s",
        "block_hashes",
        "deadline_s",
        "has_hit",
        "is_online",
        "is_priority",
        "known_to_executor",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_reached_tokens",
        "num_reported_tokens",
        "params",
        "prefix_nodes",
        "prompt_logprobs",
        "prompt_logprobs_reported",
        "prompt_token_ids",
        "put_off_s",
        "report_every_step",
        "request_class",
        "request_id",
        "salt",
        "scheduled_s",
        "share",
        "slot",
        "status",
        "table",
        "tier",
        "tpot_slo_s",
        "trusts_cache",
        "ttft_slo_s",
        "unreported_logprobs",
        "wants_logprobs",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tier: Tier,
        arrival_s: float,
        ttft_slo_s: float = math.inf,
        tpot_slo_s: float = math.inf,
        salt: bytes = b"",
        report_every_step: bool = True,
        deadline_s: float = math.inf,
        prefix_nodes: Path = (),
        share: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.tier = tier
        self.arrival_s = arrival_s
        self.ttft_slo_s = ttft_slo_s
        self.tpot_slo_s = tpot_slo_s
        self.salt = salt
        self.report_every_step = report_every_step
        """False: tokens are collected and reported once, with the terminal output."""
        self.deadline_s = deadline_s
        """Deadline of its batch."""
        self.prefix_nodes = prefix_nodes
        """Prefix nodes that it shares with other rows of its job; empty if they are not known."""
        self.share = share
        """Name of the tenant that its offline work is charged to."""
        self.request_class: RequestClass = request_class(tier)
        self.is_online = self.request_class is RequestClass.ONLINE
        self.is_priority = tier is Tier.PRIORITY
        self.num_prompt_tokens = len(prompt_token_ids)
        self.wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None

        self.status = RequestStatus.WAITING
        self.table: RequestTable | None = None
        self.slot = -1
        self.block_hashes: list[bytes] = []
        """Chained hashes of its full blocks, computed when needed."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache at the first admission."""
        self.has_hit = False
        """Whether its last admission found blocks in the prefix cache."""
        self.trusts_cache = True
        """Whether it may use cached KV. False once other requests' KV may have corrupted its own: it then computes all
        of its KV and shares none."""
        self.num_preemptions = 0
        self.num_reached_tokens = 0
        """Most tokens whose KV it had when it was preempted."""
        self.known_to_executor = False
        self.scheduled_s = self._first_token_s = 0.0
        self.admission_index = 0
        """Number of its last admission; 0 before the first. The youngest offline request is preempted first."""
        self.put_off_s = 0.0
        """Time for which late masks delayed it. While it has a slot, the table has the value."""
        self.num_reported_tokens = 0
        """Output tokens that have been reported."""
        self.unreported_logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs_reported = False
        self._output_token_ids: list[int] = []
        """Output tokens while it has no slot."""

    # ---- slots ----

    def assign_slot(self, table: RequestTable, admission_index: int) -> None:
        """Takes a slot of the table."""
        self.admission_index = admission_index
        self.slot = table.assign_slot(self, self.prompt_token_ids + self._output_token_ids, admission_index)
        self.table = table
        self.status = RequestStatus.RUNNING

    def free_slot(self, status: RequestStatus) -> None:
        """Frees its slot; its blocks have been freed before. A token that a step in flight samples is dropped."""
        table = self.table
        assert table is not None
        self._output_token_ids = self.output_token_ids(0)
        self._first_token_s = float(table.first_token_s[self.slot])
        self.put_off_s = float(table.put_off_s[self.slot])
        table.free_slot(self.slot)
        self.table, self.slot, self.status = None, -1, status

    def note_answer(self, num_tokens: int) -> None:
        """Sets the length of its output, of a request that another engine has run: the tokens are not known."""
        self._output_token_ids = [PLACEHOLDER_TOKEN_ID] * num_tokens

    # ---- progress ----

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache, or will be when the steps in flight end."""
        return 0 if self.table is None else int(self.table.computed[self.slot])

    @property
    def num_committed_tokens(self) -> int:
        """Computed tokens whose KV is in the cache already."""
        return 0 if self.table is None else int(self.table.committed[self.slot])

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, including a token that is being sampled."""
        if self.table is None:
            return self.num_prompt_tokens + len(self._output_token_ids)
        return int(self.table.total[self.slot])

    @property
    def num_known_tokens(self) -> int:
        if self.table is None:
            return self.num_prompt_tokens + len(self._output_token_ids)
        return int(self.table.known[self.slot])

    @property
    def num_output_tokens(self) -> int:
        if self.table is None:
            return len(self._output_token_ids)
        return int(self.table.total[self.slot]) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def token_ids(self) -> TokenArray:
        """[known tokens] prompt and output."""
        if self.table is None:
            return np.array(self.prompt_token_ids + self._output_token_ids, np.int32)
        return self.table.tokens[self.slot, : self.table.known[self.slot]]

    def output_token_ids(self, start: int) -> list[int]:
        """Known output tokens from ``start`` on."""
        if self.table is None:
            return self._output_token_ids[start:]
        first, end = self.num_prompt_tokens + start, self.table.known[self.slot]
        tokens: list[int] = self.table.tokens[self.slot, first:end].tolist()
        return tokens

    @property
    def block_ids(self) -> list[int]:
        return [] if self.table is None else self.table.blocks.blocks(self.slot)

    @property
    def num_blocks(self) -> int:
        return 0 if self.table is None else int(self.table.blocks.num_blocks[self.slot])

    @property
    def num_indexed_blocks(self) -> int:
        """Leading blocks whose hashes have been offered to the prefix index."""
        return 0 if self.table is None else int(self.table.indexed[self.slot])

    @property
    def last_step(self) -> int:
        """Last step in which it was scheduled since its admission; -1 if none."""
        return -1 if self.table is None else int(self.table.last_step[self.slot])

    @property
    def first_token_s(self) -> float:
        return self._first_token_s if self.table is None else float(self.table.first_token_s[self.slot])

    @first_token_s.setter
    def first_token_s(self, now_s: float) -> None:
        if self.table is None:
            self._first_token_s = now_s
        else:
            self.table.first_token_s[self.slot] = now_s

    @property
    def next_deadline_s(self) -> float:
        """Deadline of its next token."""
        num_output_tokens = self.num_output_tokens
        if num_output_tokens == 0:
            return first_token_due_s(self.arrival_s, self.ttft_slo_s)
        put_off_s = self.put_off_s if self.table is None else float(self.table.put_off_s[self.slot])
        return later_token_due_s(self.first_token_s, num_output_tokens, self.tpot_slo_s, put_off_s)

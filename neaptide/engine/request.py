"""One request inside the engine, and its status."""

from dataclasses import dataclass, field
from enum import IntEnum

from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import RequestClass, SamplingParams, Tier, request_class


class RequestStatus(IntEnum):
    WAITING = 0
    RUNNING = 1
    """Holds KV blocks; whether it takes part in a step is decided step by step."""
    FINISHED = 2


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. ``num_computed_tokens`` is the one progress counter: there are no phases."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    tier: Tier
    arrival_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    salt: bytes = b""
    report_every_step: bool = True
    """False: tokens are kept and reported once, with the terminal output."""

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output tokens known so far."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the cache, or will be when the running step ends."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of ``token_ids``, as far as they were needed."""
    num_indexed_blocks: int = 0
    """Leading blocks whose hashes have been offered to the prefix index."""

    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    num_preemptions: int = 0
    known_to_executor: bool = False
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_step: int = -1
    """Step that it last took part in."""
    admission_index: int = 0
    """Counts admissions: the youngest offline request is the first victim."""
    request_class: RequestClass = field(init=False)
    is_online: bool = field(init=False)
    num_prompt_tokens: int = field(init=False)
    unreported_token_ids: list[int] = field(default_factory=list)
    unreported_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs_reported: bool = False

    def __post_init__(self) -> None:
        # Fields, not properties: planning reads them for every request of every step.
        self.token_ids = list(self.prompt_token_ids)
        self.request_class = request_class(self.tier)
        self.is_online = self.request_class is RequestClass.ONLINE
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def next_deadline_s(self) -> float:
        """When its next token is due: ``D_1 = arrival + TTFT``, ``D_k = t_1 + (k - 1) * TPOT``."""
        if self.num_output_tokens == 0:
            return self.arrival_s + self.ttft_slo_s
        return self.first_token_s + self.num_output_tokens * self.tpot_slo_s

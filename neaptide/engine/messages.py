"""Wire structs between the API process and the engine process (msgpack over ZeroMQ).

Encoded as arrays that begin with the type's name; both sides are always the same version, because the
API process starts the engine from its own installation.
"""

from enum import StrEnum

import msgspec

from neaptide.engine.params import FinishReason, SamplingParams, Tier


class _Message(msgspec.Struct, array_like=True, gc=False, tag=True):
    pass


# ---- API process -> engine -------------------------------------------------------------------------------


class AddRequest(_Message):
    """One synchronous request (tiers priority, default, flex)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    tier: Tier
    arrival_s: float
    """``CLOCK_MONOTONIC`` when the HTTP body had been received."""
    ttft_slo_s: float
    tpot_slo_s: float
    salt: bytes = b""
    """First level of every prefix structure: requests share cached prefixes only within one salt."""
    share: str = ""
    """Whose share of the offline work a flex request takes; an API key's name."""


class AbortRequest(_Message):
    """Ends requests early. ``reason`` STOP is a stop string found by the detokenizer."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class AddBatch(_Message):
    """Rows of a batch job; prompts are read from the job's token file (``engine.offline.token_file``).

    Further messages for the same batch add rows behind those that are there; each may name another token file. Rows of
    a file that cannot be read now wait in the engine until it can be.
    """

    batch_id: str
    path: str
    """Path stem of the token file."""
    rows: list[int]
    """Rows still to run, in file order; rows that finished before a restart are left out."""
    params_table: list[SamplingParams]
    params_index: list[int]
    """For each entry of ``rows`` its index in ``params_table``."""
    stream_rows: list[int]
    """Rows whose tokens are wanted at every step (they carry stop strings); the rest report once, at the end."""
    deadline_s: float
    """``CLOCK_MONOTONIC`` second by which the job should be done."""
    salt: bytes = b""
    share: str = ""
    """As in ``AddRequest``."""


class CancelBatch(_Message):
    """Rows that have started end with ABORT; the others are forgotten without a word, however many they are."""

    batch_id: str


class TwoEnds(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What it takes to go along an order from both ends: it is sorted by compute density, the densest rows first."""

    held_tokens: bytes
    """[order] int32: tokens of KV that each row holds on average while it runs ..."""
    lasting_steps: bytes
    """[order] int32: ... which is for so many steps: the tokens of its answer."""
    densities: list[float]
    """Compute over memory time of as many windows of equal numbers of rows, in the order ..."""
    memory_s: list[float]
    """... and their memory time."""
    root_density: float
    """Of all of it."""
    token_s: float
    """What the device takes to compute a token ..."""
    kv_token_s: float
    """... and to read the KV of one."""
    turns: bytes
    """[order] int32: in which they are expected to be handed out."""
    starts: bytes = b""
    """[order] int32: the step, from the first one with this order on, in which each row is to start; negative for rows
    without. Empty if there is no timetable."""
    kv_tokens: int = 0
    """Of the memory that these starts are for."""
    num_first: int = 0
    """So many rows at the front, whatever their density, come before either end."""
    tile_tokens: int = 1
    """Of the device: steps should have multiples of so many tokens."""


class PlanReady(_Message):
    """An order over rows that waited when planning began. It takes the place of the one before at once.

    Rows that have been handed out or have ended meanwhile are skipped, those that came later stand behind. Numbers are
    raw arrays, for an order may have some hundred thousand.
    """

    batch_ids: list[str]
    batches: bytes
    """[order] int32: index into ``batch_ids``."""
    rows: bytes
    """[order] int32."""
    ends: TwoEnds | None = None
    """None: it is to be followed from its begin only."""


class SetOffline(_Message):
    """The operator's switch: while paused no offline request takes part in a step."""

    paused: bool


class TellTraffic(_Message):
    """Asks for a piece of the record of what is served, with what runs and waits now (``engine.record.traffic``)."""


class TellRoom(_Message):
    """Asks what room for online work there is."""

    with_cached: bool
    """And what the cache holds."""


class Shutdown(_Message):
    pass


ToEngine = (
    AddRequest | AbortRequest | AddBatch | CancelBatch | PlanReady | SetOffline | TellTraffic | TellRoom | Shutdown
)


# ---- engine -> API process -------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Log-probabilities at one position: of the token that stands there, and of the top-k."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class RequestOutput(msgspec.Struct, array_like=True, gc=False):
    """New tokens of one request. ``finish_reason`` set means: this is its one terminal output.

    Batch rows have the ``request_id`` of a ``RowId``.
    """

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """For each new token, and at the end one more for ``stop_token_id``."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent once, with the first output; entry i belongs to prompt token i + 1."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop or end-of-sequence token that ended it (not part of ``new_token_ids``)."""
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    num_preemptions: int = 0
    scheduled_s: float = 0.0
    """When the request first took part in a step (engine clock, ``CLOCK_MONOTONIC``)."""
    first_token_s: float = 0.0


class StepStats(msgspec.Struct, array_like=True, gc=False):
    """What one step did. Durations in seconds; blocks are counts at the end of the step."""

    step: int
    now_s: float
    duration_s: float
    predicted_s: float
    margin_s: float
    budget_s: float
    schedule_s: float
    prepare_s: float
    model_s: float
    sample_s: float
    commit_s: float
    online_prefill_tokens: int
    online_decode_tokens: int
    offline_prefill_tokens: int
    offline_decode_tokens: int
    running_online: int
    running_offline: int
    waiting_online: int
    waiting_offline: int
    """Flex requests and preempted rows waiting, and batch rows not yet admitted."""
    blocks_free: int
    blocks_cached: int
    blocks_online: int
    blocks_offline: int
    cached_tokens: int
    """Prompt tokens that this step's admissions found in the prefix cache."""
    admitted_prompt_tokens: int
    online_cached_tokens: int
    online_admitted_prompt_tokens: int
    preempted_online: int
    preempted_offline: int
    recomputed_tokens: int
    """Tokens whose KV was dropped by this step's preemptions."""
    saved_blocks: int = 0
    """Copied to host memory as they left the cache ..."""
    loaded_blocks: int = 0
    """... and back, for requests that this step admitted."""
    blocks_reserved: int = 0
    """That offline admissions leave for online work, those that it holds included."""
    memory_ran_out: int = 0
    """Times in this step; the executor then computes it in pieces."""
    mask_s: float = 0.0
    """Seconds that the step waited for masks of grammars."""
    late_masks: int = 0
    """Number of masks that were not there in time."""
    grammar_bytes: int = 0
    """Host memory that grammars take, about."""
    is_given_up: bool = False
    """For an online request that came: no token of it counts, nor does what it admitted and preempted, which the step
    behind it tells."""


class Outlook(StrEnum):
    """Whether a batch will end in its window; also the values of the metric label ``outlook``."""

    ON_TIME = "on_time"
    AT_RISK = "at_risk"
    """Not at the rate at which offline work was done of late."""
    INFEASIBLE = "infeasible"
    """Not even with the whole device."""


class BatchOutlook(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What the engine expects of one batch. Answers are taken to be as long as those that have ended."""

    batch_id: str
    outlook: Outlook
    needed_s: float
    """With the whole device, the batches before it included."""
    expected_s: float | None
    """At the rate at which offline work was done of late; None if that is not known."""
    left_s: float
    """Until the deadline."""
    running_rows: bytes = b""
    """Rows that have put out tokens and not ended (int32) ..."""
    running_tokens: bytes = b""
    """... and how many each has (int32)."""


class Traffic(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A piece of the record of what is served."""

    piece: bytes
    """For ``engine.record.traffic`` to read."""
    has_present: bool
    """It was asked for, and says what runs and waits, but nothing of what ended: the piece before it does."""


class Room(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What room for online work an engine has, for whoever decides which of several gets a request."""

    free_slack_s: float
    """Of the TTFT target, what is left when the prompts that are there are computed beside the streams."""
    prompt_token_s: float
    """What a further prompt token takes from it."""
    cached: bytes | None = None
    """``kv.cache_digest.digest_of`` the cached blocks, one key after the other; None: that was not asked for."""
    online_load: float = 0.0
    """The share of the engine's time that its online targets need."""


class EngineReady(_Message):
    """Sent once, when weights are loaded and warm-up is done."""

    model_path: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: list[int]
    longest_step_s: float = 0.0
    """The longest step that its limits allow, as predicted; longer silence than a few of these is a hang."""
    planned_order: str = ""
    """That its policy follows (``engine.offline.planning.pooled``); empty if it follows none."""
    token_s: float = 0.0
    """What the device takes to compute one more token of a full step ..."""
    kv_token_s: float = 0.0
    """... and to read one more cached one, as predicted at the start."""
    tile_tokens: int = 1
    """Its steps should have multiples of so many tokens."""


class Occupancy(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What runs, waits and is held between two steps, as ``StepStats`` has it at the end of one."""

    running_online: int
    running_offline: int
    waiting_online: int
    waiting_offline: int
    blocks_free: int
    blocks_cached: int
    blocks_online: int
    blocks_offline: int
    blocks_reserved: int


class StepOutputs(_Message):
    """Everything one or more steps have to say; also the heartbeat, with empty ``outputs``, at least once a second."""

    outputs: list[RequestOutput]
    stats: list[StepStats]
    outlooks: list[BatchOutlook] | None = None
    """Of all batches, now and then; None says nothing."""
    traffic: list[Traffic] | None = None
    """Now and then; None says nothing."""
    room: Room | None = None
    """As it was asked for; None says nothing."""
    occupancy: Occupancy | None = None
    """Where no step has just ended to tell it, for what ends between steps may leave none to run; None says nothing."""


class EngineFatal(_Message):
    """Last words of an engine that cannot go on (bad model, out of memory at start)."""

    message: str


FromEngine = EngineReady | StepOutputs | EngineFatal


to_engine_encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_encoder = msgspec.msgpack.Encoder()
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

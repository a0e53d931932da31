"""Wire structs between the API process and the engine process (msgpack over ZeroMQ).

They are encoded as arrays that begin with the type's name. Both sides always have the same version, because the API
process starts the engine from its own installation.
"""

from enum import StrEnum
from typing import Any

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
    """``CLOCK_MONOTONIC`` when the last byte of the HTTP request reached the machine."""
    ttft_slo_s: float
    tpot_slo_s: float
    salt: bytes = b""
    """Salt of the prefix hashes. Requests share cached prefixes only if their salts are equal."""
    share: str = ""
    """API key's name, which accounts for the offline work of a flex request."""


class AbortRequest(_Message):
    """Ends requests early. ``reason`` STOP is a stop string found by the detokenizer."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class AddBatch(_Message):
    """Lines of a batch job; prompts are read from the job's token file (``engine.offline.token_file``).

    Later messages for the same batch append lines; each may name another token file. While a file cannot be read, its
    lines wait in the engine.
    """

    batch_id: str
    path: str
    """Path stem of the token file."""
    rows: list[int]
    """Lines still to run, in file order. Lines that ended before a restart are omitted."""
    params_table: list[SamplingParams]
    params_index: list[int]
    """Index into ``params_table`` for each entry of ``rows``."""
    stream_rows: list[int]
    """Lines whose tokens are reported at every step (they have stop strings). The others report once, at the end."""
    deadline_s: float
    """``CLOCK_MONOTONIC`` second by which the job should be done."""
    salt: bytes = b""
    share: str = ""
    """As in ``AddRequest``."""


class CancelBatch(_Message):
    """Ends started rows with ABORT. The other rows are dropped without an output."""

    batch_id: str


class DualScanPlan(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Dual-scan order: rows sorted by compute density, densest first, to be taken from both ends."""

    held_tokens: bytes
    """[order] int32: tokens of KV that each row holds on average while it runs."""
    lasting_steps: bytes
    """[order] int32: steps for which each row runs, which is the length of its answer in tokens."""
    densities: list[float]
    """Compute time over memory time of consecutive windows with equal numbers of rows, in the order."""
    memory_s: list[float]
    """Memory time of each window, in seconds."""
    root_density: float
    """Compute time over memory time of the whole order."""
    token_s: float
    """Seconds that the device takes to compute one token."""
    kv_token_s: float
    """Seconds that the device takes to read the KV of one token."""
    turns: bytes
    """[order] int32: rows in the expected order of admission."""
    starts: bytes = b""
    """[order] int32: step, counted from the start of this order, in which each row is to start. Negative for rows
    without a start step. Empty if there is no timetable."""
    kv_tokens: int = 0
    """Tokens of KV memory that ``starts`` was planned for."""
    num_first: int = 0
    """Rows at the front that are admitted before both ends, whatever their density."""
    tile_tokens: int = 1
    """Tile size of the device. The token count of a step should be a multiple of it."""


class PlanReady(_Message):
    """Order of the rows that waited when planning began. It replaces the earlier order at once.

    Rows that have been admitted or have ended since are skipped. Rows that came later are appended. Numbers are raw
    arrays, because an order may have several hundred thousand rows.
    """

    batch_ids: list[str]
    batches: bytes
    """[order] int32: index into ``batch_ids``."""
    rows: bytes
    """[order] int32."""
    ends: DualScanPlan | None = None
    """Dual-scan data. None: the order is followed from its start only."""


class SetOffline(_Message):
    """The operator's switch: while paused, no offline request is scheduled."""

    paused: bool


class SetShareWeights(_Message):
    """Weights of tenants for what is admitted from now on; 1 unless given."""

    weights: dict[str, float]


class TellTraffic(_Message):
    """Asks for a piece of the traffic record that includes the present requests (``engine.record.traffic``)."""


class TellRoom(_Message):
    """Asks how much online work the engine can take."""

    with_cached: bool
    """Whether the answer includes the cached blocks."""


class Shutdown(_Message):
    pass


ToEngine = (
    AddRequest
    | AbortRequest
    | AddBatch
    | CancelBatch
    | PlanReady
    | SetOffline
    | SetShareWeights
    | TellTraffic
    | TellRoom
    | Shutdown
)


# ---- engine -> API process -------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Log-probabilities at one position: of the chosen token and of the top k."""

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
    """One entry for each new token, and at the end one more for ``stop_token_id``."""
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
    """When the request was first scheduled (engine clock, ``CLOCK_MONOTONIC``)."""
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
    """Tokens computed again: the request had their KV before a preemption, and the cache has lost it."""
    saved_blocks: int = 0
    """Blocks copied to host memory as they left the cache."""
    loaded_blocks: int = 0
    """Blocks copied back from host memory, for requests that this step admitted."""
    blocks_reserved: int = 0
    """Blocks for online work, those it holds included. Offline admissions may use only the rest."""
    memory_ran_out: int = 0
    """Number of times that the step ran out of device memory; the executor then computes it in pieces."""
    mask_s: float = 0.0
    """Seconds that the step waited for masks of grammars."""
    late_masks: int = 0
    """Number of masks that were late."""
    grammar_bytes: int = 0
    """Host memory that grammars take, roughly."""
    is_aborted: bool = False
    """Whether an online arrival aborted the step. None of its tokens count. Its admissions and preemptions are reported
    with the next step."""
    dropped_tokens: int = 0
    """Tokens whose KV preemptions dropped. Those that the cache has lost are computed again: ``recomputed_tokens``."""


class DeadlineStatus(StrEnum):
    """Deadline status of a batch; also the values of the metric label ``outlook``."""

    ON_TIME = "on_time"
    AT_RISK = "at_risk"
    """Not met at the recent rate of offline work."""
    INFEASIBLE = "infeasible"
    """Not met even with the whole device."""


class BatchDeadlineStatus(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Expected end of one batch. Assumes that answers are as long as those that have ended."""

    batch_id: str
    outlook: DeadlineStatus
    needed_s: float
    """Seconds with the whole device, including the batches before it."""
    expected_s: float | None
    """Seconds at the recent rate of offline work; None if that is not known."""
    left_s: float
    """Seconds until the deadline."""
    running_rows: bytes = b""
    """Rows with output tokens that have not ended (int32)."""
    running_tokens: bytes = b""
    """Number of output tokens of each entry of ``running_rows`` (int32)."""


class Traffic(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A piece of the traffic record."""

    piece: bytes
    """An encoded ``engine.record.traffic.TrafficPiece``."""
    has_present: bool
    """Whether the piece was asked for. It then has the present requests, and no ended ones: the piece before has
    those."""


class Room(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Online capacity of an engine, for the router that chooses among several."""

    free_slack_s: float
    """Part of the TTFT target that is left after the waiting prompts, in seconds, while the streams run."""
    prompt_token_s: float
    """Seconds of it that one more prompt token takes."""
    cached: bytes | None = None
    """Concatenated ``kv.cache_digest.digest_of`` of the cached blocks. None if it was not asked for."""
    online_load: float = 0.0
    """Fraction of the engine's time that its online targets need."""


class HeldStep(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One step and the work that it held. Times are on the engine's clock; predictions are seconds."""

    step: int
    start_s: float
    """When its planning began."""
    end_s: float
    """When the device had done it."""
    busy_s: float
    """Time on the device."""
    mask_s: float
    """Part of it spent waiting for masks of grammars."""
    predicted_s: float
    margin_s: float
    online_s: float
    """Predicted time of the step without its offline work."""
    streams_s: float
    """Predicted time of its online decodes alone."""
    streams: bytes
    """Admission numbers of its online decodes, int32."""
    chunks: list[tuple[int, int, int]]
    """Its online prefill chunks: admission number, tokens, context before them."""
    offline_prefill_tokens: int = 0
    offline_decode_tokens: int = 0
    waiting_online: int = 0
    """Online requests that the step left waiting."""
    free_slots: int = 0
    available_blocks: int = 0
    """KV blocks that could be allocated without preemption."""
    online_blocks: int = 0
    offline_blocks: int = 0
    reserved_blocks: int = 0
    """Forecast: blocks for online work, those it holds included."""
    is_aborted: bool = False
    admitted: list[tuple[int, str]] = []
    """Online requests that the step admitted: admission number, request id."""
    preempted: list[str] = []
    """Requests preempted since the step before."""
    offline_limit: str = ""
    """What ended offline work in the step (``scheduler.draft.Limit``); empty if not reported."""
    lengths: list[tuple[str, float, float, str]] = []
    """Step lengths that the policy chose: for whose work (``prompts`` or ``offline``), seconds, expected late
    requests, and which of these are the most (``scheduler.judged.Candidate.term``)."""


class DeviceCharge(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Cost of a batch, or of the chats or flex requests of a key, since the last charge."""

    share: str
    """API key's name, as in ``AddRequest``."""
    work: str
    """``chats``, ``flex`` or ``batch``."""
    batch_id: str
    """Empty for other work."""
    device_s: float
    """Device time, of which its readers of each shared prefix bear equal parts. Negative if others take over more."""
    computed_s: float
    """Device time of its own parts of steps."""
    prefill_tokens: float
    """Tokens of prefill, split as ``device_s`` is."""
    computed_tokens: int
    """Tokens of prefill that its own parts of steps computed."""
    decode_tokens: int
    recomputed_tokens: int
    """Tokens of both that were computed again after a preemption."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache at first admissions."""
    num_preemptions: int


class RecentSteps(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Steps since the report before, with what each held."""

    now_s: float
    block_size: int
    steps: list[HeldStep]
    taken: list[tuple[str, float, int]]
    """Online requests that the engine took in: id, when, prompt tokens."""
    online_s: float = 0.0
    """Device time of online work."""
    offline_s: dict[str, float] = {}
    """Device time of offline work, by share."""
    is_paused: bool = False
    """Whether the operator has paused offline work."""
    span_s: float = 0.0
    """Time since the report before, or since the engine's start."""
    charges: list[DeviceCharge] = []
    """They add up to ``online_s`` and ``offline_s``, apart from what moves between them."""


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
    """Predicted time of the longest step that its limits allow. Silence for several times this is a hang."""
    planned_order: str = ""
    """Name of the order that its policy follows (``engine.offline.planning.pooled``); empty if none."""
    token_s: float = 0.0
    """Predicted seconds that one more token's matrix products add to a full step, at the start."""
    kv_token_s: float = 0.0
    """Predicted seconds to read the KV of one more token, at the start."""
    tile_tokens: int = 1
    """Tile size of the device. The token count of a step should be a multiple of it."""
    pair_s: float = 0.0
    """Predicted seconds of prefill attention for a (query, key) pair, at the start."""
    costs: dict[str, Any] = {}
    """Recipe of the step times, at the start; empty if unknown."""
    max_step_tokens: int = 0
    max_num_seqs: int = 0
    offline_kv_tokens: int = 0
    """Most tokens of KV that offline work may hold."""


class Occupancy(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Requests that run and wait, and blocks that are held, between two steps; fields as in ``StepStats``."""

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
    """Reports of one or more steps. Also the heartbeat, with empty ``outputs``, at least once a second."""

    outputs: list[RequestOutput]
    stats: list[StepStats]
    outlooks: list[BatchDeadlineStatus] | None = None
    """Deadline status of all batches, sent now and then; None if unchanged."""
    traffic: list[Traffic] | None = None
    """Traffic record, sent now and then; None if there is no piece."""
    room: Room | None = None
    """Answer to ``TellRoom``; None without a question."""
    recent: RecentSteps | None = None
    """Steps since the last report that had them; None if there are none."""
    occupancy: Occupancy | None = None
    """Occupancy when no step has just ended, as a request may end between steps. None with ``stats``."""


class EngineFatal(_Message):
    """Last message of an engine that cannot go on (bad model, out of memory at start)."""

    message: str
    is_wrong_value: bool = False
    """Whether its configuration has a value that cannot be used."""


FromEngine = EngineReady | StepOutputs | EngineFatal


to_engine_encoder = msgspec.msgpack.Encoder()
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_encoder = msgspec.msgpack.Encoder()
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

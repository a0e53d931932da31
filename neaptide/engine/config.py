"""Frozen configuration of the engine. Built once by the composition root, never written to afterwards."""

import msgspec


class SharedReads(msgspec.Struct, frozen=True):
    """How an attention kernel reads a prefix that several decodes of a step share."""

    decodes_per_read: int
    """Decodes that one read of the prefix serves."""
    min_tokens: int
    """Length from which a prefix is shared; of a shorter one, every decode reads its own."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int = 16
    """Tokens per KV block; also the unit that prefix hashes cover. 0 leaves it to the executor, which states it once
    started."""
    num_blocks: int | None = None
    """Blocks in the pool; ``None`` derives them from ``kv_cache_bytes``."""
    kv_cache_bytes: int | None = None
    """Memory for KV blocks when ``num_blocks`` is not given. ``None`` takes 1 GiB on a CPU. On a GPU it takes 80% of
    what is free once the weights are loaded."""
    enable_prefix_cache: bool = True
    host_cache_bytes: int = 0
    """Host memory for blocks that leave the cache while requests may still need them, if the executor can copy them."""
    num_host_blocks: int = 0
    """Blocks that fit into ``host_cache_bytes``; stated by the executor once started."""
    slot_copies: bool = False
    """Whether the executor copies single slots and reads blocks from either end; stated by the executor once
    started."""
    shared_reads: SharedReads | None = None
    """Prefixes that the executor's kernel reads once for several requests; stated by the executor once started.
    ``None``: every request reads its own."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    policy: str = "neaptide"
    """A name in ``neaptide.engine.scheduler.policies``."""
    left_out: tuple[str, ...] = ()
    """Disabled parts of the policy, for ablation experiments: names in ``neaptide.engine.scheduler.parts``."""
    max_num_seqs: int = 256
    """Requests that may hold KV at once."""
    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step."""
    max_model_len: int = 8192
    """Most prompt and output tokens of one request."""
    ttft_slo_s: float = 1.0
    """Default target; bounds the step time for requests that have not arrived yet."""
    tpot_slo_s: float = 0.1
    late_price_s: float = 1.5
    """Seconds of offline work that one online request in time is worth."""
    offline_max_kv_ratio: float = 0.9
    """Largest fraction of the blocks that offline requests hold."""
    share_weights: dict[str, float] = {}
    """Weight of each API key in the offline work, by the key's name; 1 unless given."""
    delivery_latency_s: float = msgspec.field(default=0.005, name="egress_s")
    """Time from a step's commit to the client's socket. The scheduler meets deadlines this much early."""
    overlap_depth: int = 0
    """Steps in flight while the next one is planned (0 = plan after the result is in)."""
    abortable_steps: bool = msgspec.field(default=False, name="gives_up_steps")
    """Whether an online arrival aborts a step of offline work alone between layers, if the executor can."""
    bros_initial_batch_size: int = 16
    """First batch size of policy ``bros`` after a step without room for every urgent request. The paper does not state
    its value."""


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True):
    kind: str = "torch"
    """A name in ``neaptide.executors.registry``."""
    model_path: str = ""
    """Directory in Hugging Face layout (config.json, *.safetensors)."""
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int = 0
    """Compute threads on a CPU; 0 leaves torch's choice."""
    cpu_kernels: str = "auto"
    """On a CPU: ``auto`` takes kernels in C where there is a compiler, ``native`` requires them, ``torch`` uses
    none."""
    gpu_kernels: str = "auto"
    """On a GPU: ``auto`` takes Triton kernels that pass a self-test against torch, ``triton`` requires them, ``torch``
    uses none."""
    quantization: str = "none"
    """On a CPU: ``w8a8`` computes linear layers with 8-bit weights and activations where that is faster."""
    batch_invariant: bool = False
    """Makes a request's output bit for bit independent of other requests and of how its prompt is cut."""
    max_model_len: int = 0
    """Most tokens of a request, which some position embeddings depend on; 0 for the model's own default."""
    eos_token_ids: tuple[int, ...] | None = None
    """Tokens that end an output, from all files of the model; None for those of its configuration."""
    sim_step_s: float = 0.005
    """Step time of the ``sim`` executor."""
    arguments: dict[str, str] = {}
    """Arguments of the executor, by name, as the operator wrote them."""


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cost model of step times comes from."""

    name: str | None = None
    """Name or file of a device profile. ``None`` takes one of an earlier start, else measures."""
    kept_in: str | None = None
    """Directory of profiles that earlier starts measured; ``None`` keeps none."""
    model_fingerprint: str = ""
    """Distinguishes models of the same name; without it no profile is kept."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    profile: ProfileConfig = ProfileConfig()
    log_level: str = "info"
    log_format: str = "json"
    request_log_path: str | None = None
    """Append-only JSON lines, one when a request is first scheduled and one when it ends; ``None`` writes none."""
    request_log_max_bytes: int = 64 << 20
    """Size at which the log is rotated: it becomes ``PATH.1``, that ``PATH.2``, and so on."""
    request_log_old_files: int = 1
    """Number of rotated logs that are kept."""
    step_log_path: str | None = None
    """Step log to write (``engine.record.step_log``); an earlier one is kept as ``PATH.1``. ``None`` writes none."""
    step_log_max_bytes: int | None = None
    """Size at which the step log ends. It is never rotated: a replay needs it from its start."""
    records_traffic: bool = False
    """Whether the engine sends summaries of what it serves (``engine.record.traffic``)."""
    offline_plan: str = "auto"
    """Whether the offline pool is planned as a whole. ``on`` and ``off`` apply to policies that work without a plan
    too; ``auto`` plans for those where the device works while the host plans. ``off`` applies to all policies."""
    crash_marker_fd: int | None = None
    """Descriptor of inherited memory where the engine notes its running step. The supervisor makes one for each engine
    process."""
    arrivals_fd: int | None = None
    """Descriptor of inherited memory where sent online requests are counted. Without it no step is aborted."""

"""Frozen configuration of the engine. Built once by the composition root, never written to afterwards."""

import msgspec


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int = 16
    """Tokens per KV block; also the unit that prefix hashes cover. 0 leaves it to the executor, which states it when it
    has started."""
    num_blocks: int | None = None
    """Blocks in the pool; ``None`` derives them from ``kv_cache_bytes``."""
    kv_cache_bytes: int | None = None
    """Memory for KV blocks when ``num_blocks`` is not given; ``None`` takes 1 GiB on a CPU, and on a GPU 80% of what
    is free once the weights are loaded."""
    enable_prefix_cache: bool = True
    host_cache_bytes: int = 0
    """Host memory for blocks that leave the cache while requests may still want them, if the executor can copy them."""
    num_host_blocks: int = 0
    """Blocks that fit there; stated by the executor when it has started."""
    two_tenant_blocks: bool = False
    """The executor reads blocks from either end and copies single slots; stated by it when it has started."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    policy: str = "neaptide"
    """A name in ``neaptide.engine.scheduler.policies``."""
    left_out: tuple[str, ...] = ()
    """Parts of the policy that are left out, for experiments: names in ``neaptide.engine.scheduler.parts``."""
    max_num_seqs: int = 256
    """Requests that may hold KV at once."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step at most."""
    max_model_len: int = 8192
    """Prompt + output tokens of one request at most."""
    ttft_slo_s: float = 1.0
    """Default target, used for the bound that protects requests that have not arrived yet."""
    tpot_slo_s: float = 0.1
    offline_max_kv_ratio: float = 0.9
    """Offline requests hold at most this share of the blocks."""
    share_weights: dict[str, float] = {}
    """Of the shares that API keys have of the offline work, by the key's name; 1 unless given."""
    egress_s: float = 0.005
    """From a step's commit to the client's socket; deadlines are met this much early."""
    overlap_depth: int = 0
    """Steps in flight while the next one is planned (0 = plan after the result is in)."""
    gives_up_steps: bool = False
    """Steps of offline work alone are given up between layers when an online request comes: where the executor can."""
    bros_initial_batch_size: int = 16
    """Of the policy ``bros``: requests of a batch after a step that could not take in all that is urgent. The paper's
    number is lost."""


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
    """On a CPU: ``auto`` takes kernels in C where there is a compiler, ``native`` insists on them, ``torch`` does
    without."""
    gpu_kernels: str = "auto"
    """On a GPU: ``auto`` takes kernels in Triton that compute there what torch computes, ``triton`` insists on them,
    ``torch`` does without."""
    quantization: str = "none"
    """On a CPU: ``w8a8`` computes linear layers with 8-bit weights and activations where that is faster."""
    batch_invariant: bool = False
    """A request's bits depend on nothing else that is computed beside it, before it or how it was cut."""
    sim_step_s: float = 0.005
    """Step time of the ``sim`` executor."""
    arguments: dict[str, str] = {}
    """For executors that take some: name -> value, as the operator wrote them."""


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cost model of step times comes from."""

    name: str | None = None
    """A device profile's name, or its file; ``None`` takes one of an earlier start, else measures."""
    kept_in: str | None = None
    """Directory of profiles that were measured at earlier starts; ``None`` keeps none."""
    model_fingerprint: str = ""
    """Tells models apart that have the same name; none is kept without it."""


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
    """A fuller log becomes ``PATH.1``, that ``PATH.2``, and so on."""
    request_log_old_files: int = 1
    """How many of those are kept."""
    step_log_path: str | None = None
    """Step log to write (``engine.record.step_log``); an earlier one is kept as ``PATH.1``. ``None`` writes none."""
    step_log_max_bytes: int | None = None
    """Where the step log ends; it cannot go on in another file, because a replay needs it from its start."""
    records_traffic: bool = False
    """Whether the engine tells in short what it serves (``engine.record.traffic``)."""
    offline_plan: str = "auto"
    """Whether the offline pool is planned as a whole for a policy that can do without: ``on``, ``off``, or ``auto``
    where the device works beside the host. ``off`` is for all policies."""
    witness_fd: int | None = None
    """Inherited memory in which the engine notes the step that it is running; set by the supervisor for each life."""
    arrivals_fd: int | None = None
    """The same, in which online requests are counted when they are sent. Without it no step is given up."""

"""Every setting of the server; ``settings_sources`` reads them.

The fields of ``Settings`` are the only table: the command line's flags and help, ``docs/settings.md`` and the checks of
values are made from them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, get_args, get_origin, get_type_hints

import msgspec

EMBEDDED_MODEL = "neaptide-tiny"


TOKENS = "TOKENS"
"""The metavar of settings that count tokens; ``token_count`` reads them."""
_MULTIPLES = {"k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20}


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Option:
    """Help text of a setting, and the values that it takes beyond its type."""

    help: str
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    low: float | None = None
    above: float | None = None
    high: float | None = None
    is_repeated: bool = False
    """A list whose flag is given once for each entry, which may contain commas; else commas divide it."""
    page: str | None = None
    """In ``docs/``, where more is said."""

    @property
    def range_text(self) -> str:
        """In words."""
        bounds = (("at least", self.low), ("above", self.above), ("at most", self.high))
        return " and ".join(f"{words} {bound:,g}" for words, bound in bounds if bound is not None) or "finite"

    def admits(self, value: float) -> bool:
        """Whether a number is in range."""
        is_high_enough = (self.low is None or value >= self.low) and (self.above is None or value > self.above)
        return is_high_enough and (self.high is None or value <= self.high)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the server. Flags win over environment variables, those over the TOML file."""

    model: Annotated[
        str,
        Option("Model to serve: a directory in Hugging Face layout, a hub id, or the embedded neaptide-tiny.", "MODEL"),
    ] = EMBEDDED_MODEL
    served_model_name: Annotated[
        str | None, Option("Name of the model in the API; by default the last part of MODEL.", "ID")
    ] = None
    host: Annotated[str, Option("Address to listen on.", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Option("Port to listen on; 0 takes a free port.", "PORT", low=0, high=65535)] = 8000
    data_dir: Annotated[
        str, Option("Directory for uploaded files, batches and results. It survives restarts.", "DIR")
    ] = "~/.local/share/neaptide"
    store: Annotated[
        str | None,
        Option(
            "Database for files and batches: postgresql://USER@HOST/DATABASE. The default is SQLite in the data "
            "directory.",
            "URL",
            page="cluster",
        ),
    ] = None
    blobs: Annotated[
        str | None,
        Option(
            "File storage that several servers share: file:///DIRECTORY or s3://BUCKET/PREFIX. Needs --store. By "
            "default files are in the data directory of the one server.",
            "URL",
            page="cluster",
        ),
    ] = None
    chunk_lease_s: Annotated[
        float,
        Option(
            "With --blobs: if a server is silent for this long, others take over its batch lines.",
            "SECONDS",
            low=1,
            high=600,
            page="cluster",
        ),
    ] = 15.0
    file_retention_days: Annotated[
        float,
        Option(
            "Days to keep batch files, unless the client sets another expiry.",
            "DAYS",
            above=0,
            high=36_500,
        ),
    ] = 30.0
    request_log_max_mb: Annotated[
        float,
        Option(
            "Size at which engine-requests.jsonl in the data directory is rotated.",
            "MB",
            above=0,
            high=1e6,
        ),
    ] = 64.0
    request_log_old_files: Annotated[
        int, Option("Rotated engine-requests.jsonl files to keep.", "N", low=0, high=1000)
    ] = 1
    tool_call_parser: Annotated[
        str,
        Option(
            "How the model writes tool calls, by vLLM's names: hermes, llama3_json, mistral and so on; none leaves "
            "them in the text. auto: as the chat template and the names of tokens say. One of your own is named "
            "module:Class.",
            "NAME",
            page="tools-and-reasoning",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Option(
            "How the model sets its reasoning apart, by vLLM's names: qwen3, deepseek_r1, and so on; none leaves it in "
            "the text. auto: as the chat template and the names of tokens say. One of your own is named module:Class.",
            "NAME",
            page="tools-and-reasoning",
        ),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool,
        Option("Accepted for vLLM's users; calls of tool_choice auto are always parsed.", page="tools-and-reasoning"),
    ] = False
    device: Annotated[
        str,
        Option(
            "Device that runs the model. auto is a CUDA GPU if there is one, else the CPU.",
            choices=("auto", "cpu", "cuda"),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        Option(
            "Data type of weights and KV cache. auto is the checkpoint's type if the device computes it natively.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    profile: Annotated[
        str | None,
        Option(
            "Device profile, which says how long steps take: a file, or a built-in one (a100-40g-llama-3.1-8b, "
            "a100-40g-sxm-opt-13b-tp2, a100-40g-sxm-opt-30b-tp4, a100-80g-deepseek-67b-tp8, a100-80g-llama-2-7b, "
            "a100-80g-llama-3-70b-tp8, a100-80g-llama-3.1-8b, a100-80g-qwen2.5-72b-tp8, a100-80g-qwen2.5-7b, cpu-111m, "
            "cpu-neaptide-tiny, h100-80g-llama-3.1-8b, h200-llama-3.1-8b). By default the one measured at an earlier "
            "start, else a short measurement.",
            "NAME|FILE",
            page="simulate-plan-loadtest",
        ),
    ] = None
    policy: Annotated[
        str,
        Option(
            "Scheduling policy: neaptide, fcfs, priority, that of an installed package, or one of your own as "
            "module:Class.",
            "NAME",
            page="write-a-policy",
        ),
    ] = "neaptide"
    ttft_slo_ms: Annotated[
        float, Option("Target for the time to the first token (TTFT), unless a request sets its own.", "MS", above=0)
    ] = 1000.0
    tpot_slo_ms: Annotated[
        float | None,
        Option(
            "Target for the mean time per further token (TPOT), unless a request sets its own. By default 50 with "
            "--device cuda, else 100.",
            "MS",
            above=0,
        ),
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        Option(
            "Accepted API key, with its tier, the admin right and its weight in batch work. Without keys every request "
            "is accepted.",
            "KEY[:TIER][:admin][:xN]",
            is_repeated=True,
            page="operations",
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Option(
            "TOML file of further API keys, with their limits. A changed file is read again without a restart.",
            "FILE.toml",
            page="keys",
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Names accepted in the Host header besides loopback names; * accepts any. By default any, except that a "
            "server on loopback without keys accepts loopback names only, which stops DNS rebinding.",
            "NAME,...",
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            "Web sites whose pages may call this server, as https://name; * allows any. By default none.", "ORIGIN,..."
        ),
    ] = ()
    completion_windows: Annotated[
        tuple[str, ...], Option("Accepted values of a batch's completion_window, such as 24h.", "24h,...")
    ] = ("24h",)
    late_price_s: Annotated[
        float,
        Option(
            "Seconds of offline work that one online request in time is worth: a higher price protects chats, a lower "
            "one brings batches further.",
            "SECONDS",
            low=0,
            page="scheduling",
        ),
    ] = 1.5
    offline_max_kv_ratio: Annotated[
        float, Option("Largest share of the KV cache that offline work may hold.", "RATIO", above=0, high=1)
    ] = 0.9
    offline_plan: Annotated[
        str,
        Option(
            "Order all waiting batch lines together once there are 500. auto: only where the next step is planned "
            "while one runs, as on GPUs.",
            choices=("auto", "on", "off"),
            page="offline-planning",
        ),
    ] = "auto"
    give_up_steps: Annotated[
        str,
        Option(
            "Abort a batch-only step as soon as an online request arrives (torch on CPU, policy neaptide). Such steps "
            "may then be longer.",
            choices=("on", "off"),
            page="scheduling",
        ),
    ] = "on"
    metrics_compat: Annotated[
        str,
        Option("Also export the series that stock vLLM dashboards read.", choices=("vllm", "none")),
    ] = "vllm"
    max_model_len: Annotated[
        int | None,
        Option(
            "Largest number of prompt and output tokens of one request; by default the model's own limit. As in vLLM, "
            "8k is 8,000 and 8K is 8,192.",
            TOKENS,
            low=1,
        ),
    ] = None
    max_num_seqs: Annotated[int, Option("Largest number of requests in the KV cache at once.", "N", low=1)] = 256
    max_num_batched_tokens: Annotated[int, Option("Largest number of tokens computed in one step.", TOKENS, low=1)] = (
        2048
    )
    block_size: Annotated[
        int | None, Option("Tokens per KV block; by default 16, or the executor's own choice.", TOKENS, low=1)
    ] = None
    kv_cache_gib: Annotated[
        float | None,
        Option(
            "Memory for the KV cache. By default 1 on a CPU, and on a GPU 80% of the memory that the weights leave "
            "free. With --executor vllm the default is what gpu_memory_utilization leaves.",
            "GIB",
            above=0,
            high=1e6,
        ),
    ] = None
    host_cache_gib: Annotated[
        float,
        Option(
            "Host memory for KV blocks that are evicted but may be needed again: preempted requests, conversations, "
            "shared prefixes of batches. Blocks are copied only if that is cheaper than computing them again.",
            "GIB",
            low=0,
            high=1e6,
        ),
    ] = 0.0
    num_threads: Annotated[
        int,
        Option(
            "Compute threads on a CPU. 0 = automatic: one thread per 16 MiB of weights; leaves one core free on "
            "machines with more than two.",
            "N",
            low=0,
        ),
    ] = 0
    cpu_kernels: Annotated[
        str,
        Option(
            "CPU kernels. auto: our C kernels if there is a C compiler, and for matrix products whatever is fastest at "
            "start. native: the same, but the server does not start without a compiler. torch: PyTorch's own.",
            choices=("auto", "native", "torch"),
        ),
    ] = "auto"
    gpu_kernels: Annotated[
        str,
        Option(
            "GPU kernels for attention, rotary embedding and KV writes. auto: Triton if a self-test passes, else "
            "torch. triton: the server does not start if the test fails. torch: PyTorch's own.",
            choices=("auto", "triton", "torch"),
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        Option(
            "w8a8 computes linear layers in 8 bits (CPU only), where that is faster at start. Outputs differ slightly "
            "from the checkpoint's.",
            choices=("none", "w8a8"),
            page="models",
        ),
    ] = "none"
    batch_invariant: Annotated[
        bool,
        Option(
            "Identical output bit for bit, whatever else runs (CPU, float32, slower).",
            page="models",
        ),
    ] = False
    max_connections: Annotated[
        int,
        Option(
            "Largest number of open client connections. Beyond it the longest idle one is closed. If none is idle, a "
            "new one may only ask for probes and metrics. With --api-processes it holds for each process.",
            "N",
            low=1,
        ),
    ] = 4096
    api_processes: Annotated[
        int,
        Option(
            "Number of processes that answer chats, completions and responses, each on one core. Give more than 1 "
            "where one core cannot send all tokens.",
            "N",
            low=1,
            high=64,
            page="operations",
        ),
    ] = 1
    max_online_requests: Annotated[
        int,
        Option(
            "Largest number of online choices that run or wait. A further request gets 503 with Retry-After, unless "
            "its API key has less than an equal share.",
            "N",
            low=1,
        ),
    ] = 4096
    max_offline_requests: Annotated[
        int,
        Option("The same for flex requests, which get 429 with Retry-After. Batch lines do not count.", "N", low=1),
    ] = 4096
    header_timeout_s: Annotated[
        float,
        Option(
            "Time limit for the first byte of a new connection, and for complete request headers.", "SECONDS", above=0
        ),
    ] = 10.0
    body_timeout_s: Annotated[
        float,
        Option("Longest pause inside a request body. The whole body must average 500 bytes/s.", "SECONDS", above=0),
    ] = 30.0
    send_timeout_s: Annotated[
        float, Option("Longest time that a client may read nothing of its reply.", "SECONDS", above=0)
    ] = 30.0
    engine_timeout_s: Annotated[
        float,
        Option(
            "Longest silence of the engine before it is replaced. Silence of 9 s is enough unless its step was "
            "predicted to take long.",
            "SECONDS",
            low=5,
            page="operations",
        ),
    ] = 120.0
    drain_timeout_s: Annotated[
        float,
        Option("After a stop signal, time for replies that have begun to finish.", "SECONDS", low=0),
    ] = 30.0
    drain_min_s: Annotated[
        float,
        Option(
            "After a stop signal, shortest time for which new requests are still answered, with 503. Set it to the "
            "time that a load balancer needs to notice.",
            "SECONDS",
            low=0,
            high=3600,
            page="operations",
        ),
    ] = 0.0
    stream_keep_alive_s: Annotated[
        float,
        Option("Longest silence on an event stream before a comment keeps it alive; 0 sends none.", "SECONDS", low=0),
    ] = 10.0
    log_level: Annotated[str, Option("Lowest level that is logged.", choices=("debug", "info", "warning", "error"))] = (
        "info"
    )
    log_format: Annotated[
        str,
        Option(
            "Log format on stderr: one JSON object per line, text for people, or auto: text on a terminal, else JSON.",
            choices=("auto", "json", "text"),
        ),
    ] = "auto"
    step_log: Annotated[
        str | None,
        Option(
            "File that records every scheduling decision, for replay; no prompt text. It grows by about 200 bytes a "
            "step, or a fifth of that if the name ends in .gz. An existing file is kept as FILE.1.",
            "FILE",
            page="simulation",
        ),
    ] = None
    step_log_max_mb: Annotated[
        float,
        Option(
            "Size at which the step log ends. The server goes on without it.",
            "MB",
            above=0,
            high=1e9,
        ),
    ] = 4096.0
    shadow: Annotated[
        str,
        Option(
            "Replay recent traffic in a background simulation under vLLM's schedulers and show the difference. Records "
            "no text.",
            choices=("on", "off"),
            page="operations",
        ),
    ] = "on"
    executor: Annotated[
        str,
        Option(
            "What computes steps: torch (our own), vllm (vLLM's workers under our scheduler), or sim (made-up tokens, "
            "for tests).",
            "NAME",
            page="vllm",
        ),
    ] = "torch"
    executor_arg: Annotated[
        tuple[str, ...],
        Option(
            "Argument for the executor, by the executor's own name; may be repeated.",
            "K=V",
            is_repeated=True,
            page="vllm",
        ),
    ] = ()
    engine_python: Annotated[
        str | None,
        Option(
            "Python interpreter of the engine process, if the executor is installed in another environment. By default "
            "the server's own.",
            "FILE",
            page="vllm",
        ),
    ] = None
    sim_step_ms: Annotated[float, Option("Time that a step of the sim executor takes.", "MS", low=0)] = 5.0

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.choices and value not in option.choices:
                raise SettingsError(f"{name} = {value!r} is not supported; use {' or '.join(option.choices)}")
            if isinstance(value, int | float) and not option.admits(value):
                raise SettingsError(f"{name} = {value} is out of range: it must be {option.range_text}")
        if self.blobs is not None and self.store is None:
            raise SettingsError("blobs = ... is for servers that share a database: give --store too")


_HINTS = get_type_hints(Settings, include_extras=True)
OPTIONS: Mapping[str, Option] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}
DEFAULTS = Settings()
EXPERT = "expert"
"""The group that only ``--help-all`` shows. A setting that no other group names belongs to it."""
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "model": (
        "model",
        "served_model_name",
        "device",
        "dtype",
        "quantization",
        "executor",
        "tool_call_parser",
        "reasoning_parser",
    ),
    "network": ("host", "port", "api_key", "api_key_file", "allowed_hosts", "cors_origins"),
    "targets": ("ttft_slo_ms", "tpot_slo_ms", "late_price_s", "policy", "profile"),
    "batches": ("data_dir", "completion_windows", "file_retention_days", "store", "blobs"),
    "memory": ("kv_cache_gib", "host_cache_gib", "offline_max_kv_ratio"),
    "limits": (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_online_requests",
        "max_offline_requests",
        "max_connections",
        "drain_timeout_s",
        "drain_min_s",
    ),
    "logging": ("log_level", "log_format", "step_log", "metrics_compat"),
}
_GROUPED = {name for names in _GROUPS.values() for name in names}
GROUPS = {**_GROUPS, EXPERT: tuple(name for name in OPTIONS if name not in _GROUPED)}
"""Settings by subject, in the order of the help and of ``docs/settings.md``."""


def type_of(name: str) -> type:
    """The type of a setting's values: str, int, float, bool, or tuple for a list of texts."""
    hint = get_args(_HINTS[name])[0]
    if get_origin(hint) is tuple:
        return tuple
    kind: type = next((part for part in get_args(hint) if part is not type(None)), hint)
    return kind


def token_count(text: str) -> int:
    """A number of tokens with vLLM's suffixes: ``8k`` is 8,000, ``8K`` 8,192, ``25.6k`` 25,600.

    Raises:
        ValueError: it is no whole number.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text)
    if found is None:
        return int(text)
    count = Fraction(found[1]) * _MULTIPLES[found[2]]
    if count.denominator != 1:
        raise ValueError(f"{text} is {float(count):g} tokens")
    return int(count)


def default_text(name: str) -> str:
    """The default of a setting as a flag would give it; empty where there is none."""
    default = getattr(DEFAULTS, name)
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None else str(default)


def split_list(text: str) -> tuple[str, ...]:
    """The entries of a list that commas divide."""
    return tuple(part for part in text.split(",") if part)

"""Every setting of the server; ``settings_sources`` reads them.

The fields of ``Settings`` are the only table: the command line's flags and help, ``docs/settings.md`` and the checks of
values are made from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, get_args, get_origin, get_type_hints

import msgspec

EMBEDDED_MODEL = "neaptide-tiny"


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Option:
    """What is said of a setting, and which values it takes beyond its type."""

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
    """What an operator may set. Flags win over environment variables, those over the TOML file."""

    model: Annotated[
        str, Option("Directory in Hugging Face layout, a hub id, or the embedded neaptide-tiny.", "MODEL")
    ] = EMBEDDED_MODEL
    served_model_name: Annotated[
        str | None, Option("Id of the model on the API; by default the last part of its name.", "ID")
    ] = None
    host: Annotated[str, Option("Address to listen on.", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.", "PORT", low=0, high=65535)] = 8000
    data_dir: Annotated[
        str, Option("Directory of files, batches and the results of both; survives restarts.", "DIR")
    ] = "~/.local/share/neaptide"
    store: Annotated[
        str | None,
        Option(
            "Database of files and batches: postgresql://USER@HOST/DATABASE; by default SQLite in the data directory.",
            "URL",
            page="cluster",
        ),
    ] = None
    blobs: Annotated[
        str | None,
        Option(
            "Storage of files that several servers on one --store share: file:///DIRECTORY or s3://BUCKET/PREFIX; by "
            "default the data directory, and one server.",
            "URL",
            page="cluster",
        ),
    ] = None
    chunk_lease_s: Annotated[
        float,
        Option(
            "With --blobs: so long after its last sign of life the lines that a server has claimed are others'.",
            "SECONDS",
            low=1,
            high=600,
            page="cluster",
        ),
    ] = 15.0
    file_retention_days: Annotated[
        float,
        Option(
            "Life of batch input and result files whose client asks for no other; their results go with them.",
            "DAYS",
            above=0,
            high=36_500,
        ),
    ] = 30.0
    request_log_max_mb: Annotated[
        float,
        Option(
            "Largest size of engine-requests.jsonl in the data directory; a fuller one becomes the first old one.",
            "MB",
            above=0,
            high=1e6,
        ),
    ] = 64.0
    request_log_old_files: Annotated[int, Option("How many old ones are kept.", "N", low=0, high=1000)] = 1
    device: Annotated[str, Option("Where the model runs.", choices=("auto", "cpu", "cuda"))] = "auto"
    dtype: Annotated[
        str,
        Option(
            "Type of weights and KV cache; auto is the checkpoint's own where the device computes it natively.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    profile: Annotated[
        str | None,
        Option(
            "Device profile of the step times; by default one of an earlier start, else a short measurement.",
            "NAME|FILE",
            page="calibration",
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
    ttft_slo_ms: Annotated[float, Option("Default target for the time to the first token.", "MS", above=0)] = 1000.0
    tpot_slo_ms: Annotated[
        float | None,
        Option(
            "Default target for the mean time per further token; by default 50 with device cuda, else 100.",
            "MS",
            above=0,
        ),
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        Option(
            "Accepted keys, each with its tier, the mark of an operator and its weight in the offline work; by default "
            "there is no authentication.",
            "KEY[:TIER][:admin][:xN]",
            is_repeated=True,
            page="operations",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Names in the Host header that are answered beside loopback names; * is any. By default any, but a server "
            "on loopback without keys answers loopback names only: no web page reaches it by a name of its own.",
            "NAME,...",
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Option("Sites whose pages may call from a browser, as https://name; * is any, by default none.", "ORIGIN,..."),
    ] = ()
    completion_windows: Annotated[
        tuple[str, ...], Option("Values of a batch's completion_window that are accepted.", "24h,...")
    ] = ("24h",)
    offline_max_kv_ratio: Annotated[
        float, Option("Largest share of the KV blocks that offline work holds.", "RATIO", above=0, high=1)
    ] = 0.9
    offline_plan: Annotated[
        str,
        Option(
            "Whether pools of 500 batch rows and more are planned as a whole, at idle priority in a process of its "
            "own; auto does so where the device works beside the host, for a CPU has next to nothing to gain by it.",
            choices=("auto", "on", "off"),
            page="planning",
        ),
    ] = "auto"
    give_up_steps: Annotated[
        str,
        Option(
            "Whether a step without online work is given up between layers when an online request comes, and may be "
            "longer for it, under the policy neaptide where the executor can: torch on a CPU.",
            choices=("on", "off"),
            page="scheduling",
        ),
    ] = "on"
    metrics_compat: Annotated[
        str,
        Option("Whether the series that stock vLLM dashboards read are exported too.", choices=("vllm", "none")),
    ] = "vllm"
    max_model_len: Annotated[
        int | None,
        Option("Prompt and output tokens of one request at most; by default the model's own limit.", "TOKENS", low=1),
    ] = None
    max_num_seqs: Annotated[int, Option("Requests that hold KV at once.", "N", low=1)] = 256
    max_num_batched_tokens: Annotated[int, Option("Tokens computed in one step at most.", "TOKENS", low=1)] = 2048
    block_size: Annotated[
        int | None, Option("Tokens per KV block; by default 16, or what the executor prefers.", "TOKENS", low=1)
    ] = None
    kv_cache_gib: Annotated[
        float | None,
        Option(
            "Memory for KV blocks; by default 1 on a CPU, on a GPU 80% of what is free beside the weights, or with "
            "executor = 'vllm' what its gpu_memory_utilization leaves.",
            "GIB",
            above=0,
            high=1e6,
        ),
    ] = None
    host_cache_gib: Annotated[
        float,
        Option(
            "Host memory for KV blocks that leave the cache while requests may still want them: preempted requests, "
            "conversations, shared prefixes of batches. Copied only where that is cheaper than computing them again.",
            "GIB",
            low=0,
            high=1e6,
        ),
    ] = 0.0
    num_threads: Annotated[
        int,
        Option(
            "Compute threads on a CPU; 0 is one for each 16 MiB of weights, at most both of two cores or all but one.",
            "N",
            low=0,
        ),
    ] = 0
    cpu_kernels: Annotated[
        str,
        Option(
            "What computes on a CPU: auto, kernels in C where the system has a compiler (compiled when they are first "
            "needed, kept in the user's cache) and matrix products in the way that measures fastest at start; native, "
            "the same, but no start without a compiler; torch, neither.",
            choices=("auto", "native", "torch"),
        ),
    ] = "auto"
    gpu_kernels: Annotated[
        str,
        Option(
            "What computes attention, rotates, writes the cache and copies its slots on a GPU, with the torch "
            "executor: auto, kernels in Triton once all of them have computed there what torch computes, which is "
            "tried at start; triton, the same, but no start without them; torch, neither. They have run on one H100.",
            choices=("auto", "triton", "torch"),
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        Option(
            "On a CPU: w8a8 computes linear layers with weights and activations of 8 bits where that measures faster "
            "at start, logits as they are. Other numbers than the checkpoint's, a little.",
            choices=("none", "w8a8"),
            page="models",
        ),
    ] = "none"
    batch_invariant: Annotated[
        bool,
        Option(
            "On a CPU: a request's bits do not depend on what is computed beside it, nor on chunks, cache hits or "
            "preemption. In float32 by the kernels in C, and slower.",
            page="models",
        ),
    ] = False
    max_connections: Annotated[
        int,
        Option(
            "Open client connections. Beyond it the one that has been idle longest is closed; where none is idle, a "
            "further one may ask for probes and metrics only.",
            "N",
            low=1,
        ),
    ] = 4096
    max_online_requests: Annotated[
        int,
        Option(
            "Choices of online requests at work or waiting; a further request gets 503 with Retry-After.",
            "N",
            low=1,
        ),
    ] = 4096
    max_offline_requests: Annotated[
        int,
        Option("The same for flex requests, which get 429 with Retry-After; batch lines do not count.", "N", low=1),
    ] = 4096
    header_timeout_s: Annotated[
        float,
        Option(
            "Time for a new connection to say something, and for request headers to be complete.", "SECONDS", above=0
        ),
    ] = 10.0
    body_timeout_s: Annotated[
        float,
        Option(
            "Longest rest inside a request body; over the whole body 500 bytes/s are the least.", "SECONDS", above=0
        ),
    ] = 30.0
    send_timeout_s: Annotated[
        float, Option("Longest time that a client may take no byte of a reply.", "SECONDS", above=0)
    ] = 30.0
    engine_timeout_s: Annotated[
        float,
        Option(
            "Longest silence of the engine before it is replaced. After 9 s it is replaced unless its step was "
            "predicted to take long.",
            "SECONDS",
            low=5,
            page="operations",
        ),
    ] = 120.0
    drain_timeout_s: Annotated[
        float,
        Option(
            "After a stop signal, the longest time that replies which have begun may take to end.", "SECONDS", low=0
        ),
    ] = 30.0
    log_level: Annotated[str, Option("Least level that is logged.", choices=("debug", "info", "warning", "error"))] = (
        "info"
    )
    log_format: Annotated[
        str,
        Option(
            "An object on each line of stderr, or text for people; a line for each request.", choices=("json", "text")
        ),
    ] = "json"
    step_log: Annotated[
        str | None,
        Option(
            "File for every decision of the scheduler, for replay; no prompt text. Grows by about 200 bytes a step, or "
            "a fifth of that if the name ends in .gz. A log that is there is kept as FILE.1.",
            "FILE",
            page="simulation",
        ),
    ] = None
    step_log_max_mb: Annotated[
        float,
        Option(
            "Size at which the step log ends; the server goes on without it. A replay needs a log from its start, so "
            "it does not go on in another file.",
            "MB",
            above=0,
            high=1e9,
        ),
    ] = 4096.0
    shadow: Annotated[
        str,
        Option(
            "Whether the last minutes are simulated under other policies, at idle priority in a process of its own, to "
            "say what co-serving won; it records no text.",
            choices=("on", "off"),
            page="operations",
        ),
    ] = "on"
    executor: Annotated[
        str,
        Option(
            "What computes steps: torch, our own; vllm, vLLM's workers under our scheduler; or sim, tokens from a "
            "hash, for tests of everything around it.",
            "NAME",
            page="vllm",
        ),
    ] = "torch"
    executor_arg: Annotated[
        tuple[str, ...],
        Option("An argument of the executor, under the executor's name for it.", "K=V", is_repeated=True, page="vllm"),
    ] = ()
    engine_python: Annotated[
        str | None,
        Option(
            "Python interpreter of the engine process, for executors whose packages do not go with ours; by default "
            "the server's own.",
            "FILE",
            page="vllm",
        ),
    ] = None
    sim_step_ms: Annotated[float, Option("Time of a step of the sim executor.", "MS", low=0)] = 5.0

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


def type_of(name: str) -> type:
    """The type of a setting's values: str, int, float, bool, or tuple for a list of texts."""
    hint = get_args(_HINTS[name])[0]
    if get_origin(hint) is tuple:
        return tuple
    kind: type = next((part for part in get_args(hint) if part is not type(None)), hint)
    return kind


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

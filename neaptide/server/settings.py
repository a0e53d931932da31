"""Every setting of the server, and the one place that reads flags, ``NEAPTIDE_*`` variables and a TOML file."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

ENV_PREFIX = "NEAPTIDE_"
EMBEDDED_MODEL = "neaptide-tiny"


class SettingsError(ValueError):
    """A setting has a value that cannot be used; the message is one line for the operator."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may set. Flags win over environment variables, those over the TOML file."""

    model: str = EMBEDDED_MODEL
    """Directory in Hugging Face layout, a hub id, or the embedded model."""
    served_model_name: str | None = None
    """Id on the API; by default the last part of ``model``."""
    host: str = "127.0.0.1"
    port: int = 8000
    data_dir: str = "~/.local/share/neaptide"
    """Files, batches and the results of both; survives restarts."""
    file_retention_days: float = 30.0
    """Life of batch input and result files whose client asks for no other; their results go with them."""
    request_log_max_mb: float = 64.0
    """Largest size of engine-requests.jsonl in the data directory; a fuller one becomes the first old one."""
    request_log_old_files: int = 1
    """How many old ones are kept."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16; auto is the checkpoint's own where the device computes it natively."""
    profile: str | None = None
    """Device profile, a name or a file; by default one of an earlier start, else a short measurement."""
    policy: str = "neaptide"
    """Scheduling policy; those beside neaptide are baselines."""
    ttft_slo_ms: float = 1000.0
    """Default target for the time to the first token."""
    tpot_slo_ms: float | None = None
    """Default target for the mean time per further token; unless set 50 with device cuda, else 100."""
    api_key: tuple[str, ...] = ()
    """Accepted keys, each KEY or KEY:tier. None: no authentication."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are answered, beside loopback names. None: any, but on loopback without keys only
    loopback names. * is any."""
    completion_windows: tuple[str, ...] = ("24h",)
    """Values of a batch's completion_window that are accepted."""
    offline_max_kv_ratio: float = 0.9
    """Offline work holds at most this share of the KV blocks."""
    metrics_compat: str = "vllm"
    """vllm also exports the series that stock vLLM dashboards read; none does not."""
    max_model_len: int | None = None
    """Prompt and output tokens of one request at most; by default the model's own limit."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_gib: float | None = None
    """Memory for KV blocks; by default 1 on a CPU, on a GPU 80% of what is free beside the weights."""
    num_threads: int = 0
    """Compute threads on a CPU; 0 takes all cores but one, which the API process needs."""
    max_connections: int = 4096
    """Open client connections; a further one gets 503 and is closed."""
    max_online_requests: int = 4096
    """Choices of online requests at work or waiting; a further request gets 503 with Retry-After."""
    max_offline_requests: int = 4096
    """The same for flex requests, which get 429; batch lines do not count."""
    header_timeout_s: float = 10.0
    """Time for a new connection to say something, and for request headers to be complete."""
    body_timeout_s: float = 30.0
    """Longest rest inside a request body; over the whole body 500 bytes/s are the least."""
    send_timeout_s: float = 30.0
    """Longest time that a client may take no byte of a reply."""
    log_level: str = "info"
    log_format: str = "json"
    """json or text; one line for each request either way."""
    step_log: str | None = None
    """File for the step log: every decision of the scheduler, for replay. None by default."""
    step_log_max_mb: float = 4096.0
    """Size at which the step log ends; the server goes on without it."""
    executor: str = "torch"
    """sim computes no model: tokens from a hash, for tests of everything around it."""
    sim_step_ms: float = 5.0
    """Step time of the sim executor."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("ttft_slo_ms", 0, None),
            ("tpot_slo_ms", 0, None),
            ("max_model_len", 0, None),
            ("max_num_seqs", 0, None),
            ("max_num_batched_tokens", 0, None),
            ("block_size", 0, None),
            ("kv_cache_gib", 0, 1e6),
            ("max_connections", 0, None),
            ("max_online_requests", 0, None),
            ("max_offline_requests", 0, None),
            ("header_timeout_s", 0, None),
            ("body_timeout_s", 0, None),
            ("send_timeout_s", 0, None),
            ("file_retention_days", 0, 36_500),
            ("request_log_max_mb", 0, 1e6),
            ("request_log_old_files", -1, 1000),
            ("step_log_max_mb", 0, 1e9),
            ("offline_max_kv_ratio", 0, 1),
            ("port", -1, 65535),
        ):
            value = getattr(self, name)
            if value is not None and not (value > low and (high is None or value <= high)):
                raise SettingsError(f"{name} = {value} is out of range")
        for name, allowed in (
            ("device", ("auto", "cpu", "cuda")),
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("metrics_compat", ("vllm", "none")),
            ("executor", ("torch", "sim")),
            ("log_level", ("debug", "info", "warning", "error")),
            ("log_format", ("json", "text")),
        ):
            if getattr(self, name) not in allowed:
                raise SettingsError(f"{name} = {getattr(self, name)!r} is not supported; use {' or '.join(allowed)}")


def client_base_url(environ: Mapping[str, str] = os.environ) -> str:
    """The server that client commands talk to unless told otherwise."""
    return environ.get(f"{ENV_PREFIX}BASE_URL", "http://127.0.0.1:8000")


def client_api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key that client commands send unless told otherwise: where the variable is a server's, its first."""
    first = environ.get(f"{ENV_PREFIX}API_KEY", "").split(",")[0]
    if not first:
        return None
    from neaptide.server.edge.auth import split_tier  # the web framework, which no other command should wait for

    return split_tier(first)[0]


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, config_file: str | None = None
) -> Settings:
    """Merges the three sources; entries of ``flags`` that are None count as not given.

    Raises:
        SettingsError: an unknown name, a value of the wrong type or out of range, an unreadable file.
    """
    values: dict[str, Any] = {}
    config_file = config_file or environ.get(f"{ENV_PREFIX}CONFIG")
    if config_file is not None:
        try:
            values |= tomllib.loads(Path(config_file).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read the settings file {config_file}: {error}") from error
    for name in Settings.__struct_fields__:
        if (text := environ.get(ENV_PREFIX + name.upper())) is not None:
            is_list = isinstance(getattr(Settings(), name), tuple)
            values[name] = [part for part in text.split(",") if part] if is_list else text
    values |= {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        # A SettingsError from __post_init__ arrives as the cause.
        raise SettingsError(str(error.__cause__ or error)) from error

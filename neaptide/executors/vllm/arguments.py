"""Arguments for vLLM: which ones an operator may pass, and which ones Neaptide sets. Does not import vLLM.

vLLM's scheduler is never called, so its arguments would have no effect. Others ask for features that a step plan cannot
express (drafts, adapters, pipeline stages), or that another server setting decides. All of these are refused by name.
"""

import fnmatch
from collections.abc import Mapping

_SETTINGS = {
    "model": "MODEL",
    "served_model_name": "--served-model-name",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "kv_cache_memory_bytes": "--kv-cache-gib",
    "kv_offloading_size": "--host-cache-gib",
    "model_weights": "MODEL",
    "hf_config_path": "MODEL",
    "hf_overrides": "MODEL",
    "config_format": "MODEL",
    "disable_sliding_window": "MODEL",
}
"""Argument -> the Neaptide setting that decides it. The server reads a model's type, lengths and vocabulary from the
files of MODEL."""

_OUR_SCHEDULER = (
    "scheduling_policy",
    "scheduler_cls",
    "async_scheduling",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    "prefix_cache_*",
    "prefix_match_unit",
    "enable_chunked_prefill",
    "disable_hybrid_kv_cache_manager",
    "long_prefill_*",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "max_num_queued_*",
    "num_gpu_blocks_override",
    "prefill_schedule_interval",
    "scheduler_reserve_full_isl",
    "stream_interval",
    "swa_bounded_replay",
    "watermark",
)
_NOT_SERVED = {
    "adapters (LoRA)": ("enable_lora", "*_lora", "*_loras", "*lora_*"),
    "drafts": ("speculative_config", "spec_*"),
    "pipeline and data parallelism": (
        "pipeline_parallel_size",
        "data_parallel_*",
        "dp_*",
        "*_for_dp_*",
        "*elastic_ep*",
        "*fault_tolerance*",
        "nnodes",
        "node_rank",
        "master_*",
    ),
    "context parallelism": ("*context_parallel_size", "dcp_*", "cp_kv_*"),
    "KV connectors": (
        "kv_transfer_config",
        "kv_events_config",
        "kv_offloading_backend",
        "ec_transfer_config",
        "ec_manager_config",
    ),
    "models that do not generate text": (
        "runner",
        "convert",
        "pooler_config",
        "diffusion_config",
        "enable_prompt_embeds",
    ),
    "images, sound or video": ("mm_*", "*_mm_*", "*media_*", "video_*", "language_model_only"),
    "code that comes with a model": ("trust_remote_code", "code_revision"),
    "other log-probabilities than the model's own": ("logprobs_mode", "kv_sharing_fast_prefill"),
    "watermarks": ("watermark_config",),
    "sleep": ("enable_sleep_mode", "sleep_*", "enable_nccl_comm_suspend", "weight_transfer_config"),
    "workers on other machines": ("distributed_executor_backend", "ray_*"),
    "another worker": ("worker_cls", "worker_extension_cls", "model_class_overrides"),
    "a tokenizer: text never enters the engine": ("tokenizer*", "skip_tokenizer_init"),
    "downloads: MODEL is a folder": ("hf_token", "revision", "download_dir"),
    "sampling beyond the request's own parameters": ("logits_processors",),
    "generation defaults: the server has its own": ("generation_config", "override_generation_config"),
    "front end of vLLM's: Neaptide is the server": (
        "structured_outputs_config",
        "reasoning_*",
        "io_processor_plugin",
        "max_logprobs",
        "return_sampling_mask",
        "enable_return_routed_experts",
        "aux_output_config",
        "enable_trace_replay",
        "renderer_num_workers",
        "otlp_*",
        "collect_detailed_traces",
        "kv_cache_metrics*",
        "enable_mfu_metrics",
        "enable_logging_iteration_details",
        "custom_histogram_buckets",
        "show_hidden_metrics_for_version",
        "per_request_spec_decode_metrics",
        "*_log_stats",
        "log_*",
        "logging_*",
        "aggregate_engine_logging",
        "use_tqdm_on_load",
        "tokens_only",
        "shutdown_timeout",
    ),
}
"""What is not supported -> the arguments that ask for it."""

_NO_ARGUMENTS = ("help", "config")
"""Options of vLLM's parser that are not engine arguments."""

_PICKLES = ("pt", "npcache")
"""Values of ``load_format`` that read pickles instead of safetensors."""

_BOOLEANS = {"true": True, "false": False}


def check_arguments(arguments: Mapping[str, str]) -> None:
    """Checks the operator's arguments.

    Raises:
        ValueError: an argument contradicts a setting of ours. The message names it and says why.
    """
    for name in arguments:
        if (reason := _refusal(name)) is not None:
            raise ValueError(f"executor_arg {name} is not supported: {reason}")
    load_format = arguments.get("load_format", "").lower()
    if load_format in _PICKLES:
        raise ValueError(
            f"executor_arg load_format={load_format} is not supported: weights must be safetensors, not pickles"
        )


def _refusal(text: str) -> str | None:
    """The reason why an argument is refused; None if it is allowed.

    Args:
        text: the argument's name, also in the parser's variants: ``no_`` before a switch, or one of its parts after a
            dot.
    """
    name = text.partition(".")[0].removeprefix("no_")
    if name in _NO_ARGUMENTS:
        return "it is not an engine argument"
    if name in _SETTINGS:
        return f"use {_SETTINGS[name]} instead"
    if _matches(name, _OUR_SCHEDULER):
        return "vLLM's scheduler is not used; Neaptide's is"
    return next((f"no {what}" for what, names in _NOT_SERVED.items() if _matches(name, names)), None)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_device(wanted: str, found: str) -> None:
    """Checks the device that vLLM was built for.

    Raises:
        ValueError: vLLM is built for a device other than the configured one.
    """
    if wanted not in ("auto", found):
        raise ValueError(f"device = {wanted!r} is set, but this build of vLLM runs on {found!r}")


def command_line(arguments: Mapping[str, str]) -> list[str]:
    """The arguments as vLLM's parser reads them."""
    words: list[str] = []
    for name, value in arguments.items():
        head, dot, part = name.partition(".")
        flag = head.replace("_", "-") + dot + part
        switch = _BOOLEANS.get(value.lower())
        if switch is None or dot:
            words.append(f"--{flag}={value}")
        else:
            words.append(f"--{flag}" if switch else f"--no-{flag}")
    return words


def describe(arguments: Mapping[str, str]) -> str:
    """The arguments in a fixed order, for the key of a profile."""
    return " ".join(f"{name}={value}" for name, value in sorted(arguments.items()))

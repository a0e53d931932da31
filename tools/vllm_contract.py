"""Compares the parts of vLLM that we rely on (fields, signatures, arguments) with the installed version.

    .vllm/bin/python tools/vllm_contract.py            # prints the differences; exit status 1 if there are any
    .vllm/bin/python tools/vllm_contract.py --write    # writes the installed version's as the contract

The contract is ``vllm_contract.json`` in this directory. A new field does no harm in itself, since we build on
``make_empty()``; it is shown because its meaning may concern us. After this script, run the suite: ``make test-vllm``.
"""

import argparse
import dataclasses
import inspect
import json
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

CONTRACT = Path(__file__).with_suffix(".json")
FIELDS = {
    "vllm.v1.core.sched.output": ("SchedulerOutput", "CachedRequestData", "NewRequestData", "GrammarOutput"),
    "vllm.v1.outputs": ("ModelRunnerOutput",),
}
"""Dataclasses that we fill or read."""
TUPLES = {"vllm.v1.outputs": ("LogprobsLists", "LogprobsTensors")}
SIGNATURES = {
    "vllm.v1.executor": ("Executor.get_class",),
    "vllm.v1.executor.abstract": (
        "Executor.collective_rpc",
        "Executor.execute_model",
        "Executor.sample_tokens",
        "Executor.shutdown",
    ),
    "vllm.v1.executor.uniproc_executor": ("UniProcExecutor.execute_model", "UniProcExecutor.sample_tokens"),
    "vllm.v1.executor.multiproc_executor": ("MultiprocExecutor.execute_model", "MultiprocExecutor.sample_tokens"),
    "vllm.v1.engine.core": ("EngineCore.__init__", "EngineCore.shutdown"),
    "vllm.v1.core.sched.output": ("SchedulerOutput.make_empty",),
    "vllm.v1.outputs": ("AsyncModelRunnerOutput.get_output",),
    "vllm.v1.attention.backends.cpu_attn": (
        "CPUAttentionBackend.supports_block_size",
        "CPUAttentionBackend.get_supported_kernel_block_sizes",
    ),
    "vllm.engine.arg_utils": (
        "EngineArgs.add_cli_args",
        "EngineArgs.from_cli_args",
        "EngineArgs.create_engine_config",
    ),
    "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner.execute_model", "GPUModelRunner.sample_tokens"),
    "vllm.v1.worker.gpu.model_runner": ("GPUModelRunner.execute_model", "GPUModelRunner.sample_tokens"),
}
CONSTANTS = {
    "vllm.v1.worker.gpu.sample.logit_bias": ("MAX_NUM_STOP_TOKEN_IDS", "MAX_NUM_LOGIT_BIAS_TOKENS"),
}
"""Limits of the V2 runner that our API respects (``Kind.max_masked_ends``; 1,024 biases)."""
ATTRIBUTES = {
    "vllm.config:VllmConfig": (
        "model_config",
        "scheduler_config",
        "cache_config",
        "parallel_config",
        "device_config",
        "use_v2_model_runner",
    ),
    "vllm.config:ModelConfig": (
        "model",
        "dtype",
        "is_multimodal_model",
        "is_encoder_decoder",
        "is_hybrid",
        "is_attention_free",
        "use_mla",
        "get_vocab_size",
    ),
    "vllm.config:SchedulerConfig": ("async_scheduling", "enable_chunked_prefill", "max_num_batched_tokens"),
    "vllm.config:CacheConfig": ("num_gpu_blocks", "block_size"),
    "vllm.config:ParallelConfig": ("world_size", "tensor_parallel_size"),
    "vllm.config:DeviceConfig": ("device_type",),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("kv_cache_spec",),
    "vllm.v1.kv_cache_interface:KVCacheTensor": ("size", "offset"),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("block_size",),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("block_size",),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": ("block_size",),
    "vllm.v1.core.sched.output:SchedulerOutput": ("make_empty",),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": (
        "supports_block_size",
        "get_supported_kernel_block_sizes",
    ),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("generator",),
    "vllm.v1.executor.multiproc_executor:WorkerProcHandle": ("proc",),
    "vllm.platforms.interface:Platform": ("is_cpu",),
}
"""Attributes of vLLM's classes that we read. The three specifications are supported caches, recognised by name."""
INSTANCES = {
    "engine": (
        "model_executor",
        "vllm_config.model_config.runner_type",
        "scheduler.kv_cache_config.kv_cache_groups",
    ),
    "processes": ("workers", "is_failed"),
    "V1": ("kv_caches", "input_batch.req_id_to_index", "input_batch.generators", "requests"),
    "V2": ("kv_caches",),
}
"""Attributes that exist only after vLLM has started, of its ``EngineCore``, its executor with worker processes, and its
two model runners.

A test in vLLM's interpreter checks them (``inside/start/test_contract.py``).
"""
SAMPLING = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "detokenize",
    "logprobs",
    "prompt_logprobs",
]
"""Sampling parameters that we pass on."""
ENGINE_ARGUMENTS = [
    "model",
    "dtype",
    "skip_tokenizer_init",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "disable_hybrid_kv_cache_manager",
    "swa_bounded_replay",
    "generation_config",
    "disable_log_stats",
    "use_tqdm_on_load",
]
"""Engine arguments that we set."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the installed version the contract")
    args = parser.parse_args()
    found = installed()
    if args.write:
        CONTRACT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{CONTRACT.name} now describes vLLM {found['version']}")
        return 0
    agreed: dict[str, Any] = json.loads(CONTRACT.read_text(encoding="utf-8"))
    differing = list(differences(agreed, found))
    print(f"vLLM {found['version']} against the contract of {agreed['version']}: {len(differing)} differences")
    print("\n".join(differing))
    return int(bool(differing))


def installed() -> dict[str, Any]:
    """The installed vLLM's version of everything that we rely on; None for what is missing."""
    found: dict[str, Any] = {"version": version("vllm").partition("+")[0], "fields": {}, "signatures": {}}
    for module, names in FIELDS.items():
        for name in names:
            kind = _resolve(module, name)
            fields = dataclasses.fields(kind) if kind is not None else ()
            found["fields"][f"{module}:{name}"] = {field.name: _is_required(field) for field in fields} or None
    for module, names in TUPLES.items():
        for name in names:
            kind = _resolve(module, name)
            found["fields"][f"{module}:{name}"] = None if kind is None else dict.fromkeys(kind._fields, True)
    for module, names in SIGNATURES.items():
        for name in names:
            function = _resolve(module, name)
            found["signatures"][f"{module}:{name}"] = None if function is None else _parameters(function)
    found["constants"] = {
        f"{module}:{name}": _resolve(module, name) for module, names in CONSTANTS.items() for name in names
    }
    sampling = _resolve("vllm", "SamplingParams")
    found["sampling"] = [name for name in SAMPLING if name in sampling.__struct_fields__]
    found["attributes"] = {kind: _present(kind, names) for kind, names in ATTRIBUTES.items()}
    arguments = {field.name for field in dataclasses.fields(_resolve("vllm.engine.arg_utils", "EngineArgs"))}
    found["engine_arguments"] = [name for name in ENGINE_ARGUMENTS if name in arguments]
    found["all_engine_arguments"] = sorted(arguments)
    return found


def differences(agreed: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One line for each difference."""
    lines = []
    for kind in ("fields", "signatures"):
        for name, before in agreed[kind].items():
            now = found[kind].get(name)
            if now is None:
                lines.append(f"{name} is gone")
                continue
            if kind == "signatures":
                lines += [f"{name}({', '.join(before)}) is ({', '.join(now)})"] if now != before else []
                continue
            lines += [f"{name}.{field} is gone" for field in before if field not in now]
            for field, is_required in now.items():
                if field not in before:
                    lines.append(f"{name}.{field} is new" + (", and required" if is_required else ""))
                elif is_required and not before[field]:
                    lines.append(f"{name}.{field} is required now")
    for name, value in agreed["constants"].items():
        now = found["constants"].get(name)
        lines += [f"{name} is {'gone' if now is None else now}"] if now != value else []
    for kind in ("sampling", "engine_arguments"):
        lines += [f"{kind}: {name} is gone" for name in agreed[kind] if name not in found[kind]]
    for kind, names in agreed["attributes"].items():
        lines += [f"{kind}.{name} is gone" for name in names if name not in found["attributes"].get(kind, ())]
    unknown = sorted(set(found["all_engine_arguments"]) - set(agreed["all_engine_arguments"]))
    # Arguments that are not refused are passed on: ``executors/vllm/arguments.py`` must refuse those of vLLM's
    # scheduler.
    return lines + [f"engine_arguments: {name} is new" for name in unknown]


def _resolve(module: str, name: str) -> Any:
    try:
        value = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value


def _present(kind: str, names: tuple[str, ...]) -> list[str]:
    """The names that objects of this kind have."""
    found = _resolve(*kind.split(":"))
    fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    return [name for name in names if name in fields or hasattr(found, name)]


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _parameters(function: Any) -> list[str]:
    """Parameter names, with ``=`` after optional ones."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name + ("" if p.default is inspect.Parameter.empty else "=") for p in parameters]


if __name__ == "__main__":
    sys.exit(main())

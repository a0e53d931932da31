"""What an operator may pass on to vLLM. No vLLM is needed to say no."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import EngineConfig, ExecutorConfig
from neaptide.executors.registry import start_executor
from neaptide.executors.vllm.arguments import check_arguments, check_device, command_line, describe
from neaptide.executors.vllm.start import MINOR_VERSION, import_vllm
from neaptide.launch.serve import embedded_model_path, executor_arguments
from neaptide.models.config import UnsupportedModelError

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model", "use MODEL instead"),
        ("max_num_seqs", "use --max-num-seqs instead"),
        ("block_size", "use --block-size instead"),
        ("kv_cache_memory_bytes", "use --kv-cache-gib instead"),
        ("scheduling_policy", "vLLM's scheduler is not used; Neaptide's is"),
        ("async_scheduling", "vLLM's scheduler is not used; Neaptide's is"),
        ("enable_prefix_caching", "vLLM's scheduler is not used; Neaptide's is"),
        ("long_prefill_token_threshold", "vLLM's scheduler is not used; Neaptide's is"),
        ("enable_lora", "no adapters (LoRA)"),
        ("max_lora_rank", "no adapters (LoRA)"),
        ("speculative_config", "no drafts"),
        ("data_parallel_size", "no pipeline and data parallelism"),
        ("kv_transfer_config", "no KV connectors"),
        ("trust_remote_code", "no code that comes with a model"),
        ("kv_offloading_size", "use --host-cache-gib instead"),
        ("model_weights", "use MODEL instead"),
        ("distributed_executor_backend", "no workers on other machines"),
        ("reasoning_parser", "no front end of vLLM's: Neaptide is the server"),
        ("return_sampling_mask", "no front end of vLLM's: Neaptide is the server"),
        ("swa_bounded_replay", "vLLM's scheduler is not used; Neaptide's is"),
        ("kv_sharing_fast_prefill", "no other log-probabilities than the model's own"),
        ("limit_mm_per_prompt", "no images, sound or video"),
        ("enable_elastic_ep", "no pipeline and data parallelism"),
        ("enable_nccl_comm_suspend", "no sleep"),
        ("hf_overrides", "use MODEL instead"),
        ("hf_token", "no downloads: MODEL is a folder"),
        ("logits_processors", "no sampling beyond the request's own parameters"),
        ("log_config_file", "no front end of vLLM's: Neaptide is the server"),
        ("help", "it is not an engine argument"),
        ("speculative_config.method", "no drafts"),
        ("kv_transfer_config.kv_connector", "no KV connectors"),
        ("no_async_scheduling", "vLLM's scheduler is not used; Neaptide's is"),
    ],
)
def test_what_contradicts_us_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match="is not supported") as refused:
        check_arguments({"quantization": "fp8", name: "1"})
    assert str(refused.value) == f"executor_arg {name} is not supported: {reason}"


def test_what_concerns_the_workers_alone_passes() -> None:
    names = (
        "tensor_parallel_size",
        "quantization",
        "gpu_memory_utilization",
        "enforce_eager",
        "kv_cache_dtype",
        "enable_expert_parallel",
        "attention_backend",
        "cpu_offload_gb",
        "seed",
    )
    check_arguments(dict.fromkeys(names, "1"))


def test_parts_of_an_argument_keep_their_names() -> None:
    arguments = executor_arguments(
        ["--compilation-config.cudagraph_mode=NONE", "compilation_config.pass_config.x=true"]
    )
    check_arguments(arguments)
    assert command_line(arguments) == [
        "--compilation-config.cudagraph_mode=NONE",
        "--compilation-config.pass_config.x=true",
    ]


@pytest.mark.parametrize("load_format", ["pt", "NpCache"])
def test_no_argument_makes_vllm_read_pickles(load_format: str) -> None:
    with pytest.raises(ValueError, match="is not supported: weights must be safetensors, not pickles"):
        check_arguments({"load_format": load_format})


def test_another_device_than_that_of_the_build_is_refused() -> None:
    check_device("auto", "cpu")
    check_device("cpu", "cpu")
    with pytest.raises(ValueError, match=r"^device = 'cuda' is set, but this build of vLLM runs on 'cpu'$"):
        check_device("cuda", "cpu")


def test_switches_are_said_as_the_parser_of_vllm_reads_them() -> None:
    arguments = {"enforce_eager": "true", "enable_expert_parallel": "False", "quantization": "fp8", "x": ""}
    words = ["--enforce-eager", "--no-enable-expert-parallel", "--quantization=fp8", "--x="]
    assert command_line(arguments) == words


def test_the_key_of_a_profile_does_not_depend_on_the_order() -> None:
    assert describe({"b": "2", "a": "1"}) == describe({"a": "1", "b": "2"}) == "a=1 b=2"


def test_an_interpreter_without_vllm_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = EngineConfig(executor=ExecutorConfig(kind="vllm", model_path=str(embedded_model_path())))
    with pytest.raises(ValueError, match=r"needs vLLM, which is not installed in this interpreter .* engine_python"):
        start_executor(config, MonotonicClock())


def test_an_interpreter_with_a_vllm_that_lacks_something_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("vllm")
    old.__dict__["__version__"] = "0.9.1"
    monkeypatch.setitem(sys.modules, "vllm", old)
    config = EngineConfig(executor=ExecutorConfig(kind="vllm", model_path=str(embedded_model_path())))
    with pytest.raises(ValueError, match=r"cannot use this interpreter's vLLM 0\.9\.1 .*vllm\.engine.* \(vLLM 0\.32\)"):
        start_executor(config, MonotonicClock())


@pytest.mark.parametrize(("version", "warnings"), [("0.32.4", 0), ("0.33.0", 1), ("0.3.20", 1)])
def test_another_minor_version_of_vllm_is_warned_of(
    version: str, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = ModuleType("vllm")
    vllm.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    for name in ("vllm_engine", "vllm_executor", "warm_up"):
        monkeypatch.setitem(sys.modules, f"neaptide.executors.vllm.{name}", ModuleType(name))
    import_vllm()
    assert [record.message for record in caplog.records] == [
        f"vLLM {version}: the vllm executor was written for vLLM 0.32"
    ] * warnings


def test_the_version_that_is_warned_of_is_the_one_that_is_installed() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    major, minor = (int(part) for part in MINOR_VERSION.split("."))
    assert f"vllm>={major}.{minor},<{major}.{minor + 1}" in extras["vllm"]


@pytest.mark.parametrize("arguments", [{}, {"load_format": "auto"}, {"load_format": "HF"}])
def test_weights_that_are_pickles_alone_are_refused_before_vllm_is_asked(
    arguments: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "max_position_embeddings": 20}')
    (tmp_path / "pytorch_model.bin").touch()
    config = EngineConfig(executor=ExecutorConfig(kind="vllm", model_path=str(tmp_path), arguments=arguments))
    with pytest.raises(UnsupportedModelError, match="only safetensors are loaded"):
        start_executor(config, MonotonicClock())
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="needs vLLM"):
        start_executor(config, MonotonicClock())


def test_arguments_are_refused_before_anything_is_loaded() -> None:
    executor = ExecutorConfig(
        kind="vllm", model_path=str(embedded_model_path()), arguments={"scheduling_policy": "priority"}
    )
    with pytest.raises(ValueError, match="executor_arg scheduling_policy is not supported"):
        start_executor(EngineConfig(executor=executor), MonotonicClock())

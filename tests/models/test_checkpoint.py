"""What is read from a checkpoint directory, and what is refused: always one clear line."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from neaptide.models import checkpoint
from neaptide.models.checkpoint import find_weight_files, load_model_config, load_model_facts, resolve_model
from neaptide.models.config import RopeConfig, UnsupportedModelError
from neaptide.models.fields import read_json
from neaptide.models.weights_header import read_headers

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(BASE | changes))
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_config(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_config(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 8)
    assert config.rope == RopeConfig("default", 500000.0)
    assert (config.dtype, config.eos_token_ids, config.tie_word_embeddings) == ("bfloat16", (2,), False)
    assert config.kv_bytes_per_token(2) == 2 * 2 * 2 * 8 * 2


def test_defaults_of_old_configs(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, num_key_value_heads=None, head_dim=None, torch_dtype=None))
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (6, 8, "float32")


def test_both_configurations_name_ends(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_model_config(tmp_path).eos_token_ids == (7, 9, 2)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_model_config(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}},
    ],
)
def test_both_spellings_of_rope(changes: dict[str, Any], tmp_path: Path) -> None:
    assert load_model_config(write(tmp_path, **changes)).rope == RopeConfig("linear", 500000.0, factor=2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported by our own executor"),
        ({"architectures": ["LlamaForCausalLM", "LlamaForCausalLM"]}, "architecture"),
        ({"architectures": None}, "architecture"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "never run"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "proportional"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, "rope type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e9}}, "256000000000 tokens is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1}, "rope_theta 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 4}},
            "long_factor must be 4 positive numbers",
        ),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, not nan"),
        ({"rope_theta": math.inf}, "rope_theta must be a positive number, not inf"),
        ({"rope_theta": math.nan}, "rope_theta must be a positive number, not nan"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8"),
        ({"num_key_value_heads": 4}, "evenly"),
        ({"head_dim": 7}, "odd"),
        ({"vocab_size": "100"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(write(tmp_path, **changes))


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("changes", "default", "longest"),
    [
        ({}, 256, 256),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1024, 1024),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.5}}, 640, 640),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, 256, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 256, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 256, 1024),
        ({"rope_scaling": {**LONG, "original_max_position_embeddings": 64}}, 64, 256),
        ({"rope_scaling": LONG, "original_max_position_embeddings": 64}, 64, 256),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, 512, 512),
    ],
)
def test_the_context_is_what_vllm_gives(changes: dict[str, Any], default: int, longest: int, tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, **changes))
    assert (config.served_context_tokens, config.max_position_embeddings) == (default, longest)
    facts = load_model_facts(tmp_path)
    assert facts.served_context_tokens == default
    assert config.served(0, None).max_position_embeddings == default
    assert config.served(longest, (7,)).max_position_embeddings == longest
    assert config.served(longest, (7,)).eos_token_ids == (7,)


def write_weights(directory: Path, **tensors: tuple[str, list[int]]) -> Path:
    """A safetensors file with these types and shapes, and no weights."""
    header = json.dumps(
        {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()}
    ).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


EMBEDDING, LAYER = "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("silent", [{"torch_dtype": None}, {"torch_dtype": "auto"}])
def test_a_silent_configuration_leaves_the_type_to_the_weights(silent: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **silent)
    tensors = {EMBEDDING: ("BF16", [100, 48]), LAYER: ("BF16", [80, 48]), "model.norm.weight": ("F32", [48])}
    assert load_model_config(write_weights(tmp_path, **tensors)).dtype == "bfloat16"
    write(tmp_path, torch_dtype="float16")
    assert load_model_config(tmp_path).dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but the weights have 2 layers"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, but embed_tokens.weight has the shape [100, 48]"),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_weights(tmp_path, **{EMBEDDING: ("BF16", [100, 48]), LAYER: ("BF16", [80, 48])})
    assert words in refusal(write(tmp_path, **changes))


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, (10**6).to_bytes(8, "little") + b"{}", b"\2" + bytes(7) + b"[]"])
def test_a_damaged_header_is_refused(data: bytes, tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").write_bytes(data)
    assert refusal(tmp_path) == "model.safetensors cannot be read: its header is damaged"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_is_not_read(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert refusal(tmp_path) == f"{name} is not a regular file"


@pytest.mark.parametrize("place", ["model.gguf", "org/model-GGUF"])
def test_gguf_is_refused_by_name(place: str) -> None:
    with pytest.raises(UnsupportedModelError, match="GGUF files are not supported"):
        resolve_model(place)


def test_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert refusal(tmp_path) == "this is an adapter (LoRA), not a model: merge it into its base model first"


def test_a_directory_of_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").touch()
    assert refusal(tmp_path).startswith("GGUF files are not supported: use the model's original checkpoint")


OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window is not supported"),
        ("Qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention is not"),
        ("Qwen2", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("Qwen2", {"hidden_act": "gelu"}, "gelu"),
        ("Qwen3", {"use_sliding_window": True}, "use_sliding_window is not supported"),
        ("Qwen3", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("Phi3", {"attention_bias": True}, "attention_bias is not supported"),
        ("Mistral", {"attention_bias": True}, "attention_bias is not supported"),
        ("Mistral", {"mlp_bias": True}, "mlp_bias is not supported"),
        ("Mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is not supported"),
        ("Mistral", {"sliding_window": -1}, "sliding_window must be a positive integer"),
        ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 2 numbers"),
        ("Exaone4", {"sliding_window": 64}, "layer_types must be a list of 2 names"),
        ("Olmo", {"clip_qkv": 8.0}, "clip_qkv is not supported; --executor vllm serves more models"),
        ("Cohere", {"use_qk_norm": True}, "use_qk_norm is not supported; --executor vllm"),
        ("StableLm", {"qk_layernorm": True}, "qk_layernorm is not supported; --executor vllm"),
        ("Phi", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported: only gelu_new, "),
        ("GPTNeoX", {"num_attention_heads": 7, "rotary_pct": 1.0}, "hidden_size 48 is not a multiple of the 7"),
        ("Granite", {"residual_multiplier": 0}, "residual_multiplier must be a positive number"),
        ("Llama", {"hidden_size": 4}, "hidden_size 4 is too small for 6 attention heads"),
        ("OPT", {"word_embed_proj_dim": 24}, "word_embed_proj_dim 24 is not supported: only hidden_size, 48"),
        ("OPT", {"activation_function": "gelu"}, "activation_function 'gelu' is not supported: only relu"),
        ("OPT", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine false"),
        ("OPT", {"num_attention_heads": 5}, "hidden_size 48 is not a multiple of the 5"),
        ("OPT", {"ffn_dim": None}, "ffn_dim must be a positive integer"),
    ],
)
def test_what_families_refuse(family: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    raw = OPT if family == "OPT" else BASE | {"architectures": [f"{family}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    assert words in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "context_tokens"),
    [({"sliding_window": None}, 256), ({"sliding_window": 64}, 64), ({"sliding_window": 512}, 256), ({}, 256)],
)
def test_mistral_is_served_up_to_its_window(changes: dict[str, Any], context_tokens: int, tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, architectures=["MistralForCausalLM"], **changes))
    assert config.max_position_embeddings == context_tokens


def test_a_window_that_mistral_is_silent_about_is_that_of_its_first_release(tmp_path: Path) -> None:
    long = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
    assert load_model_config(write(tmp_path, **long)).max_position_embeddings == 4096
    assert load_model_config(write(tmp_path, **long, sliding_window=None)).max_position_embeddings == 32768


def test_windows_that_qwen_does_not_use_do_not_matter(tmp_path: Path) -> None:
    for family in ("Qwen2", "Qwen3"):
        architecture = {"architectures": [f"{family}ForCausalLM"], "layer_types": ["full_attention"] * 2}
        config = load_model_config(write(tmp_path, **architecture, use_sliding_window=False, sliding_window=64))
        assert config.max_position_embeddings == 256
        assert config.head_dim == (8 if family == "Qwen2" else 128)


SHORT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("GPT2LMHeadModel", {"n_embd": 48}, {"intermediate_size": 192, "max_position_embeddings": 1024, "rope": None}),
    (
        "GPTNeoXForCausalLM",
        {"num_key_value_heads": 2},
        {"num_kv_heads": 6, "rotary_dim": 2, "parallel": True, "max_position_embeddings": 256},
    ),
    (
        "GPTNeoXForCausalLM",
        {"rotary_pct": 0.5, "rotary_emb_base": 7},
        {"rotary_dim": 4, "rope": RopeConfig("default", 7)},
    ),
    ("SmolLM3ForCausalLM", {}, {"unrotated_layers": frozenset({3}), "tie_word_embeddings": True}),
    ("StableLmForCausalLM", {}, {"rotary_dim": 2, "norm_eps": 1e-5}),
    ("GlmForCausalLM", {}, {"rotary_dim": 64, "head_dim": 128, "qkv_bias": True}),
    ("Exaone4ForCausalLM", {"sliding_window": None}, {"unrotated_layers": frozenset(), "max_position_embeddings": 256}),
    (
        "Exaone4ForCausalLM",
        {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"unrotated_layers": frozenset({3}), "max_position_embeddings": 64},
    ),
    ("CohereForCausalLM", {}, {"logit_scale": 0.0625, "tie_word_embeddings": True, "shared_norm": True}),
    ("GraniteForCausalLM", {"logits_scaling": 8}, {"logit_scale": 0.125, "attention_scale": 1.0}),
    ("InternLM3ForCausalLM", {"qkv_bias": True, "bias": False}, {"qkv_bias": True, "out_bias": False, "head_dim": 128}),
    ("Starcoder2ForCausalLM", {"sliding_window": 64}, {"max_position_embeddings": 64, "gated": False}),
]


@pytest.mark.parametrize(("architecture", "fields", "expected"), SHORT)
def test_defaults_of_families(
    architecture: str, fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Entries that a file leaves out have the family's default."""
    sizes = {"num_hidden_layers": 4, "n_layer": 4, "n_head": 6, "num_key_value_heads": 6, "rms_norm_eps": None}
    raw = BASE | {"architectures": [architecture]} | sizes | fields
    if "rope_theta" not in fields:
        del raw["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "architecture",
    [
        *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"),
        *("MambaForCausalLM", "Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    ],
)
def test_families_of_other_executors_are_refused_with_the_way_to_serve_them(architecture: str, tmp_path: Path) -> None:
    """Whatever stands in the file: with sizes, or with those of the text in a part of their own."""
    for more in ({}, {"text_config": BASE, "auto_map": {"AutoModel": "own.Model"}}):
        assert refusal(write(tmp_path, architectures=[architecture], **more)) == (
            f"architecture {architecture} is not supported by our own executor (docs/models.md lists what is); "
            "--executor vllm serves more models"
        )


def test_code_of_the_family_that_a_checkpoint_brings_along_does_not_matter(tmp_path: Path) -> None:
    """Older than the family in transformers; another class is another model."""
    auto_map = {"AutoConfig": "own.Phi3Config", "AutoModelForCausalLM": "own.Phi3ForCausalLM"}
    model = {"architectures": ["Phi3ForCausalLM"], "auto_map": auto_map}
    assert load_model_config(write(tmp_path, **model)).architecture == "Phi3ForCausalLM"
    auto_map["AutoModelForCausalLM"] = "own.NotPhi3ForCausalLM"
    assert refusal(write(tmp_path, **model)) == (
        "auto_map names the model's own code (own.NotPhi3ForCausalLM), which is never run; --executor vllm serves more "
        "models"
    )


def test_an_opt_without_more_words_is_tied(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    config = load_model_config(tmp_path)
    assert (config.tie_word_embeddings, config.num_kv_heads, config.head_dim) == (True, 6, 8)
    assert (config.intermediate_size, config.max_position_embeddings) == (80, 2048)


def test_unreadable_config(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        f"config.json is missing in {tmp_path}: this is not a model directory in Hugging Face layout"
    )
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no weights: model.safetensors is missing in /"),
        ({"pytorch_model.bin": "x"}, "only safetensors"),
        ({"consolidated.00.pth": "x"}, "only safetensors"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "one.safetensors"}}'}, "one.safetensors is missing"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "../one.safetensors"}}'}, "not a safetensors file"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "one.bin"}}'}, "not a safetensors file"),
        ({"model.safetensors.index.json": "{}"}, "no weight_map"),
        ({"model-00001-of-00002.safetensors": ""}, "no weights: model.safetensors is missing in /"),
    ],
)
def test_refused_weight_files(files: dict[str, str], words: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UnsupportedModelError, match=words):
        find_weight_files(tmp_path)


def test_all_shards_of_a_set_need_no_index(tmp_path: Path) -> None:
    shards = [tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for shard in shards:
        shard.touch()
    assert find_weight_files(tmp_path) == shards


def test_pointers_of_git_lfs_are_named(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "config.json").write_text(pointer)
    assert refusal(tmp_path) == (f"config.json is a pointer of Git LFS, not the file: run `git lfs pull` in {tmp_path}")
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors is a pointer of Git LFS"):
        read_headers([tmp_path / "model.safetensors"])


def test_a_configuration_that_names_no_architecture_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path).startswith("config.json names no architecture")


def test_a_byte_order_mark_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf{}")
    assert read_json(tmp_path / "config.json") == {}


def test_local_directories_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    assert resolve_model(str(tmp_path)) == tmp_path
    for missing in (str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(UnsupportedModelError, match="no such directory"):
            resolve_model(missing)
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedModelError, match="not a model directory"):
        resolve_model(str(tmp_path / "file"))
    with pytest.raises(UnsupportedModelError, match="home directory does not exist"):
        resolve_model("~nobody-of-this-name/model")


@pytest.mark.parametrize(
    ("with_weights", "ignored"), [(True, []), (False, ["*.safetensors", "*.safetensors.index.json"])]
)
def test_hub_download_takes_no_code_and_no_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_weights: bool, ignored: list[str]
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/model", with_weights) == tmp_path
    assert asked == {
        "repo": "org/model",
        "allow_patterns": ["*.json", "*.jinja", "*.safetensors"],
        "ignore_patterns": ignored,
    }


def test_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise OSError("cannot reach the hub\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UnsupportedModelError) as caught:
        resolve_model("org/model")
    assert "cannot reach the hub" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_module_needs_no_torch() -> None:
    code = f"import sys, {checkpoint.__name__}; sys.exit('torch' in sys.modules or 'huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FACTS = {"architectures": ["OPTForCausalLM"], "vocab_size": 9, "max_position_embeddings": 20, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (FACTS, (9, 20, (2,))),
        (FACTS | {"quantization_config": {"quant_method": "fp8"}, "seq_length": 10}, (9, 10, (2,))),
        ({"text_config": FACTS}, (9, 20, (2,))),
        (FACTS | {"auto_map": {"AutoModel": "own.Model"}}, (9, 20, (2,))),
    ],
)
def test_facts_of_a_family_that_is_none_of_ours(raw: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    facts = load_model_facts(tmp_path)
    assert (facts.vocab_size, facts.max_position_embeddings, facts.eos_token_ids) == expected


def test_facts_without_a_length_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    with pytest.raises(UnsupportedModelError, match="context length is unknown"):
        load_model_facts(tmp_path)

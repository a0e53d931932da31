"""What a checkpoint directory says about itself. No torch here: the API process reads it too.

Everything that cannot be served ends in `UnsupportedModelError` with one line for the operator.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "LlamaForCausalLM"
_DTYPES = ("float32", "bfloat16", "float16")
_HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors"]
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and, for scaled types, how frequencies are stretched."""

    rope_type: str
    """``default``, ``linear`` or ``llama3``."""
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """The checkpoint's own: ``float32``, ``bfloat16`` or ``float16``."""
    eos_token_ids: tuple[int, ...]
    """From generation_config.json where it names them, else from config.json."""
    bos_token_id: int | None

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def resolve_model(path_or_hub_id: str) -> Path:
    """The local directory of a model: ``path_or_hub_id`` itself, or a download of that Hugging Face repository.

    Only JSON, Jinja and safetensors files are fetched: no pickles, no code.

    Raises:
        UnsupportedModelError: neither a directory nor a repository that can be downloaded.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UnsupportedModelError(f"{path_or_hub_id}: a file, not a model directory")
    if path.is_absolute() or path_or_hub_id.startswith(("./", "../", "~")):
        raise UnsupportedModelError(f"{path_or_hub_id}: no such directory")
    import huggingface_hub  # slow to import, and local models never need it

    try:
        return Path(huggingface_hub.snapshot_download(path_or_hub_id, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # hub, HTTP and file errors share no base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(
            f"{path_or_hub_id}: neither a local directory nor a model that can be downloaded ({reason})"
        ) from error


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads ``config.json`` and ``generation_config.json``.

    Raises:
        UnsupportedModelError: unreadable, or something the runner does not implement.
    """
    raw = _read_json(model_dir / "config.json")
    _refuse_unsupported(raw)
    generation_path = model_dir / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    hidden_size = _positive_int(raw, "hidden_size")
    num_heads = _positive_int(raw, "num_attention_heads")
    num_kv_heads = _positive_int(raw, "num_key_value_heads", num_heads)
    head_dim = _positive_int(raw, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    return ModelConfig(
        vocab_size=_positive_int(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(raw, "intermediate_size"),
        num_layers=_positive_int(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw),
        max_position_embeddings=_positive_int(raw, "max_position_embeddings", 2048),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=_dtype(raw),
        eos_token_ids=_token_ids(generation.get("eos_token_id")) or _token_ids(raw.get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
    )


def find_weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files that hold the weights: a single one, or the shards that the index names.

    Raises:
        UnsupportedModelError: none, only pickles, or a shard is missing.
    """
    index_path = model_dir / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UnsupportedModelError(f"{index_path.name}: no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            # An index may come from anywhere: its names must not leave the directory.
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise UnsupportedModelError(f"{index_path.name}: {name!r} is not a safetensors file of this directory")
            if not (model_dir / name).is_file():
                raise UnsupportedModelError(f"shard {name} is missing")
        return [model_dir / name for name in names]
    single = model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    if any(next(model_dir.glob(pattern), None) for pattern in _PICKLE_PATTERNS):
        raise UnsupportedModelError("the weights are pickles (.bin/.pt): only safetensors are loaded")
    raise UnsupportedModelError("no weights: model.safetensors is missing")


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    architectures = raw.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise UnsupportedModelError(f"architecture {architectures} is not supported: only {ARCHITECTURE}")
    if raw.get("auto_map"):
        raise UnsupportedModelError(
            "auto_map: models that bring their own code are not supported, it is never executed"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(f"quantization_config ({method}) is not supported: only float weights")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {raw['hidden_act']!r} is not supported: only silu")
    if raw.get("sliding_window"):
        raise UnsupportedModelError("sliding_window is not supported")


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: ``rope_theta`` + ``rope_scaling``, and ``rope_parameters`` (transformers 5)."""
    fields: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    rope_type = fields.get("rope_type", fields.get("type", "default"))
    if rope_type not in ("default", "linear", "llama3"):
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported: only default, linear, llama3")
    partial = fields.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported: only 1.0")
    theta = _number(fields, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    if rope_type == "default":
        return RopeConfig("default", theta)
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor=_number(fields, "factor"))
    return RopeConfig(
        "llama3",
        theta,
        factor=_number(fields, "factor"),
        low_freq_factor=_number(fields, "low_freq_factor"),
        high_freq_factor=_number(fields, "high_freq_factor"),
        original_max_position_embeddings=_positive_int(fields, "original_max_position_embeddings"),
    )


def _dtype(raw: dict[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UnsupportedModelError(f"dtype {name!r} is not supported: only {', '.join(_DTYPES)}")
    return str(name)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise UnsupportedModelError(f"eos_token_id {value!r} is not a token id")
    return tuple(ids)


def _positive_int(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModelError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path.name} is not a JSON object")
    return value

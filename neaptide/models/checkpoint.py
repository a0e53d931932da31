"""Reads a checkpoint directory's metadata. Does not import torch, because the API process reads it too.

A model that cannot be served raises `UnsupportedModelError` with one line for the operator.
"""

import re
from pathlib import Path

from neaptide.models.config import VLLM, ModelConfig, ModelFacts, ModelUnavailableError, UnsupportedModelError
from neaptide.models.fields import RawConfig, entries, positive_int, read_json, token_ids
from neaptide.models.registry import family_of
from neaptide.models.rope import context
from neaptide.models.weights_header import TensorHeader, check_size, dtype_of, read_headers

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
GGUF = "GGUF files are not supported: use the model's original checkpoint, with safetensors files"
_HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors"]
_WEIGHT_PATTERNS = ["*.safetensors", "*.safetensors.index.json"]
_LENGTH_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""Names of the context length in different families."""
_SHARD = re.compile(r"model-\d+-of-(?P<total>\d+)\.safetensors")
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def resolve_model(path_or_hub_id: str, with_weights: bool = True) -> Path:
    """The local directory of a model: ``path_or_hub_id`` itself, or a download of that Hugging Face repository.

    Only JSON, Jinja and safetensors files are downloaded: no pickles, no code.

    Args:
        with_weights: download the weights too; a gateway needs the tokenizer only.

    Raises:
        ModelUnavailableError: it is no directory, and cannot be downloaded now.
        UnsupportedModelError: it is a path at which there is no model.
    """
    try:
        path = Path(path_or_hub_id).expanduser()
    except RuntimeError as error:
        raise UnsupportedModelError(f"{path_or_hub_id}: that home directory does not exist") from error
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        raise UnsupportedModelError(f"{path_or_hub_id}: {GGUF}")
    if path.exists():
        raise UnsupportedModelError(f"{path_or_hub_id}: this is a file, not a model directory")
    if path.is_absolute() or path_or_hub_id.startswith(("./", "../", "~")):
        raise UnsupportedModelError(f"{path_or_hub_id}: no such directory")
    if path_or_hub_id.lower().endswith("gguf"):
        raise UnsupportedModelError(f"{path_or_hub_id}: {GGUF}")
    import huggingface_hub  # slow to import, and local models never need it

    try:
        ignored = [] if with_weights else _WEIGHT_PATTERNS
        return Path(
            huggingface_hub.snapshot_download(path_or_hub_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=ignored)
        )
    except Exception as error:  # hub, HTTP and file errors share no base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailableError(
            f"{path_or_hub_id}: neither a local directory nor a model that can be downloaded ({reason}). "
            "Without network access, give a local path; HF_TOKEN opens gated models, HF_ENDPOINT sets a mirror"
        ) from error


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads ``config.json``, ``generation_config.json`` and the headers of the weights, if there are weights.

    Raises:
        UnsupportedModelError: a file cannot be read, the weights have other sizes than the configuration says, or none
            of our families supports the model.
    """
    if not (model_dir / CONFIG).exists():
        refuse_gguf(model_dir)
        if (model_dir / "adapter_config.json").exists():
            raise UnsupportedModelError("this is an adapter (LoRA), not a model: merge it into its base model first")
    raw = read_json(model_dir / CONFIG)
    family = family_of(raw.get("architectures"))
    _refuse_own_code(raw)
    if quantization := entries(raw, "quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModelError(f"quantization_config ({method}) is not supported: only float weights; {VLLM}")
    headers = weight_headers(model_dir)
    if str(raw.get("dtype") or raw.get("torch_dtype") or "auto") == "auto":
        raw |= {"dtype": dtype_of(headers)}
    config = family.parse_config(raw, _end_tokens(model_dir, raw))
    check_size(headers, config, config.num_layers)
    return config


def weight_headers(model_dir: Path) -> dict[str, TensorHeader]:
    """Headers of the weights, by tensor; empty if there are none.

    Raises:
        UnsupportedModelError: a file is damaged or missing.
    """
    has_weights = next(model_dir.glob("*.safetensors"), None) is not None or (model_dir / INDEX).exists()
    return read_headers(find_weight_files(model_dir)) if has_weights else {}


def load_model_facts(model_dir: Path) -> ModelFacts:
    """Reads the facts of a model for an executor that supports other families.

    The executor itself checks whether it supports the model, and whether the model needs code of its own, which is
    never run.

    Raises:
        UnsupportedModelError: a file cannot be read, or lacks the vocabulary size or context length.
    """
    raw = read_json(model_dir / CONFIG)
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    lengths = [positive_int(text, key) for key in _LENGTH_KEYS if text.get(key) is not None]
    if not lengths:
        raise UnsupportedModelError(f"config.json has none of {', '.join(_LENGTH_KEYS)}: the context length is unknown")
    found = context(text, min(lengths))
    return ModelFacts(
        vocab_size=positive_int(text, "vocab_size"),
        # vLLM refuses longer contexts than ``max_position_embeddings`` where the embedding does not scale that entry.
        max_position_embeddings=max(found.default, min(lengths)),
        default_context_tokens=found.default,
        eos_token_ids=_end_tokens(model_dir, text),
    )


def find_weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files with the weights: a single one, or the shards that the index names.

    Raises:
        UnsupportedModelError: there are none, only pickles, or a shard is missing.
    """
    index_path = model_dir / INDEX
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UnsupportedModelError(f"{index_path.name}: no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            # The index may be hostile: its names must not leave the directory.
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise UnsupportedModelError(f"{index_path.name}: {name!r} is not a safetensors file of this directory")
            if not (model_dir / name).is_file():
                raise UnsupportedModelError(f"shard {name} is missing")
        return [model_dir / name for name in names]
    single = model_dir / "model.safetensors"
    if single.is_file():
        return [single]
    if shards := _shards_without_index(model_dir):
        return shards
    refuse_pickles(model_dir)
    refuse_gguf(model_dir)
    raise UnsupportedModelError(f"no weights: model.safetensors is missing in {model_dir}")


def _shards_without_index(model_dir: Path) -> list[Path]:
    """The shards by their names, if all of one set are there."""
    shards = sorted(file for file in model_dir.glob("model-*-of-*.safetensors") if file.is_file())
    found = [_SHARD.fullmatch(file.name) for file in shards]
    totals = {int(match["total"]) for match in found if match is not None}
    return shards if None not in found and totals == {len(shards)} else []


def refuse_pickles(model_dir: Path) -> None:
    """Refuses a directory with weights only as pickles.

    Raises:
        UnsupportedModelError: there are weights, but no safetensors files.
    """
    if next(model_dir.glob("*.safetensors"), None) is not None:
        return
    if any(next(model_dir.glob(pattern), None) for pattern in _PICKLE_PATTERNS):
        raise UnsupportedModelError("the weights are pickles (.bin/.pt): only safetensors are loaded")


def refuse_gguf(model_dir: Path) -> None:
    """Refuses a directory with weights only as GGUF.

    Raises:
        UnsupportedModelError: there are such weights.
    """
    if next(model_dir.glob("*.gguf"), None) is not None:
        raise UnsupportedModelError(GGUF)


def _end_tokens(model_dir: Path, raw: RawConfig) -> tuple[int, ...]:
    """End tokens of both files: fine-tunes often change one of them only."""
    generation_path = model_dir / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    named = token_ids(generation.get("eos_token_id")) + token_ids(raw.get("eos_token_id"))
    # A model cannot emit tokens outside its vocabulary, and masks have no bit for them.
    vocab_size = positive_int(raw, "vocab_size")
    return tuple(dict.fromkeys(token for token in named if 0 <= token < vocab_size))


def _refuse_own_code(raw: RawConfig) -> None:
    """Refuses a model whose own code is another model than ours.

    Many checkpoints are older than their family in ``transformers``, and bring the same class along.
    """
    if auto_map := raw.get("auto_map"):
        own = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else None
        if not str(own).endswith(f".{raw['architectures'][0]}"):
            raise UnsupportedModelError(f"auto_map names the model's own code ({own}), which is never run; {VLLM}")

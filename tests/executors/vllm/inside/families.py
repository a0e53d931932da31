"""Tiny random checkpoints of some families, with enough spread in their logits to have clear winners."""

import json
import os
import string
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = int(os.environ.get("NEAPTIDE_TEST_VOCAB", "256"))
_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2}
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
_WINDOW: dict[str, Any] = {"sliding_window": 40}
"""Tokens; prompts of the tests have up to 90."""
_MIXED: dict[str, Any] = _WINDOW | {
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, **_SHAPE),
    "qwen3": Qwen3Config(**_COMMON, **_SHAPE),
    "qwen3-moe": Qwen3MoeConfig(
        **_COMMON, **_SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    ),
    "opt": OPTConfig(
        **_COMMON,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=64,
        init_std=0.25,
        pad_token_id=0,
        tie_word_embeddings=False,
    ),
    "mistral": MistralConfig(**_COMMON, **_SHAPE, **_WINDOW),
    "gemma3": Gemma3TextConfig(**_COMMON, **(_SHAPE | _MIXED), query_pre_attn_scalar=32),
    "gemma4": Gemma4TextConfig(**_COMMON, **(_SHAPE | _MIXED), global_head_dim=64, hidden_size_per_layer_input=0),
}


def write_checkpoint(family: str, directory: Path) -> PreTrainedModel:
    """Saves a random model of the family, and returns it (fp32, eval)."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[family]).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def bring_own_code(directory: Path, **changes: Any) -> None:
    """Code that ends whatever runs it, named by the model's configuration, with other ``changes`` of that."""
    (directory / "own.py").write_text("raise SystemExit('code of a model ran')\n")
    config = json.loads((directory / "config.json").read_text()) | changes
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (directory / "config.json").write_text(json.dumps(config))


def write_tokenizer(directory: Path) -> Tokenizer:
    """A token for every id: special ones below 6, printable characters, words of JSON, pairs of letters."""
    words = [f"<{i}>" for i in range(6)] + [*"\u0120\u010a", *sorted(string.printable.strip())]
    words += ['{"', '":', '",', '"}', "true", "false", "null"]
    pairs = map("".join, product(string.ascii_lowercase, repeat=2))
    vocab = {word: i for i, word in enumerate([*words, *pairs][:VOCAB])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:6])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer

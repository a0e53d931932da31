"""Llama checkpoints with random weights, written without transformers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ROPE_THETA = 500_000.0
RMS_NORM_EPS = 1e-5
SHARD_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class LlamaShape:
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the weight matrices that a step multiplies with, as the executor stacks them."""
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q_size + 2 * kv_size, self.hidden),
            "out": (self.hidden, q_size),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
            "lm_head": (self.vocab, self.hidden),
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in Hugging Face's layout, in the order of the layers."""
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.self_attn.q_proj.weight", (q_size, self.hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (kv_size, self.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (kv_size, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, q_size)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{prefix}.mlp.gate_proj.weight", (self.ffn, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.ffn, self.hidden)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.ffn)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)


LLAMA_8B = LlamaShape(4096, 14336, 32, 32, 8, 128, 128_256, 8192)
"""Llama-3.1-8B, limited to the positions that steps here need."""
TINY = LlamaShape(256, 512, 4, 8, 2, 32, 512, 1024)


def random_weights(
    shape: LlamaShape, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Matrices of standard deviation 1/sqrt(inputs): activations and logits stay near 1 at any size."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, size in shape.tensors():
        weight = torch.randn(size, generator=generator, device=device)
        scaled = 1.0 + 0.1 * weight if len(size) == 1 else weight * size[-1] ** -0.5
        yield name, scaled.to(dtype)


def write_model_dir(
    directory: Path, shape: LlamaShape, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> dict[str, Tensor]:
    """Writes ``config.json`` and safetensors shards; weights are drawn on ``device``, one shard at a time.

    Returns:
        The weights on the CPU in ``dtype``, if they fit into one shard; else an empty dict.
    """
    (directory / "config.json").write_text(json.dumps(_config(shape, dtype), indent=1))
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())):05}.safetensors"
        save_file(shard, directory / name)
        weight_map.update(dict.fromkeys(shard, name))

    for name, weight in random_weights(shape, dtype, device, seed):
        if shard and sum(tensor.nbytes for tensor in shard.values()) + weight.nbytes > SHARD_BYTES:
            flush()
            shard = {}
        shard[name] = weight.cpu()
    is_whole = not weight_map
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return shard if is_whole else {}


def _config(shape: LlamaShape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_tokenizer(directory: Path, vocab: int) -> None:
    """Writes a tokenizer in which every token is a word, because servers need a tokenizer."""
    words = {f"\u0120w{token_id}": token_id for token_id in range(vocab)}  # U+0120 is byte-level BPE's space
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": byte_level,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "\u0120w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))

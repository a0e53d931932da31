"""Rotary embeddings of every kind have the frequencies of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from neaptide.executors.torch.layers.rotary import Rotary, inverse_frequencies
from neaptide.models.checkpoint import load_model_config
from neaptide.models.config import DecoderConfig

KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16.0, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "partial_rotary_factor": 0.5},
    {"rope_type": "longrope", "short_factor": [1.0, 1.1] * 4, "long_factor": [2.0, 8.0] * 4},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["rope_type"])
@pytest.mark.parametrize("is_long", [False, True])
def test_frequencies_are_those_of_transformers(kind: dict[str, Any], is_long: bool, tmp_path: Path) -> None:
    fields = {"original_max_position_embeddings": 64} if kind["rope_type"] == "longrope" else {}
    reference = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=16,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 5000.0, **kind, **fields},
    )
    (tmp_path / "config.json").write_text(json.dumps(reference.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    config = load_model_config(tmp_path)
    context_tokens = config.max_position_embeddings if is_long else 64
    served = config.served(context_tokens, None)
    assert isinstance(served, DecoderConfig)
    assert served.rope is not None
    expected, scale = ROPE_INIT_FUNCTIONS[kind["rope_type"]](reference, torch.device("cpu"), seq_len=context_tokens)
    found = inverse_frequencies(served.rope, served.rotary_dim, served.max_position_embeddings)
    torch.testing.assert_close(found, expected)
    assert served.rope.attention_factor == pytest.approx(scale)
    table = Rotary(served, served.rope, torch.device("cpu")).table
    assert table.shape == (context_tokens, served.head_dim // 2)
    torch.testing.assert_close(table[3, : len(expected)].abs(), torch.full_like(expected, scale))
    assert (table[:, len(expected) :] == 1).all()

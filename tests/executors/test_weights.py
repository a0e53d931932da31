"""Tensors that do not fit are refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from neaptide.models.config import UnsupportedModelError
from tests.executors.driver import make_executor


def broken_copy(source: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of the checkpoint with tensors replaced, added or (None) dropped."""
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.norm.weight": None, "lm_head.weight": None}, r"lacks lm_head.weight and 1 more"),
        ({"model.layers.0.self_attn.q_proj.scale": torch.zeros(1)}, "unexpected tensor .*q_proj.scale"),
        ({"model.norm.weight": torch.zeros(49)}, r"model.norm.weight has shape \[49\], config.json says \[48\]"),
        ({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}, "only float weights"),
    ],
)
def test_refused_tensors(
    changes: dict[str, torch.Tensor | None], words: str, gqa: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        make_executor(broken_copy(gqa[0], tmp_path, **changes))


def test_damaged_file(gqa: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    broken_copy(gqa[0], tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        make_executor(tmp_path)

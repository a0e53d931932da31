"""Tiny checkpoints with quantised weights, in the layouts that vLLM's CPU build has kernels for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

GROUP = 32
"""Inputs of one scale."""
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight outputs lies at which four bits."""


def quantise(kind: str, directory: Path) -> PreTrainedModel:
    """Rewrites a checkpoint, and returns the model that it stands for now (fp32, eval)."""
    write, description = KINDS[kind]
    (file,) = directory.glob("*.safetensors")
    quantised: dict[str, Tensor] = {}
    stood_for: dict[str, Tensor] = {}
    for name, value in load_file(file).items():
        if name.endswith("_proj.weight"):
            parts, stood_for[name] = write(value)
            quantised |= {name.removesuffix("weight") + part: found for part, found in parts.items()}
        else:
            quantised[name] = stood_for[name] = value.bfloat16()
    save_file(stood_for, file, metadata={"format": "pt"})
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    file.unlink()  # its pages may be the model's
    halves = {name: value.bfloat16() if value.is_floating_point() else value for name, value in quantised.items()}
    save_file({name: value.contiguous() for name, value in halves.items()}, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": description}
    (directory / "config.json").write_text(json.dumps(config))
    return model


def _half(scale: Tensor) -> Tensor:
    """As it will be in the checkpoint."""
    return scale.bfloat16().float()


def _packed(values: Tensor, axis: int) -> Tensor:
    """Eight of four bits in an int32, the first lowest."""
    parts = values.to(torch.int64).unflatten(axis, (-1, 8))
    shifts = (torch.arange(8) * 4).view([8 if i == axis + 1 else 1 for i in range(parts.dim())])
    return (parts << shifts).sum(axis + 1).to(torch.int32)


def _in_groups(weight: Tensor, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values of 0 to 15, outputs by inputs, scales and zeros, outputs by groups, and what they stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    if is_symmetric:
        scale = _half(groups.abs().amax(-1) / 7)
        zero = torch.full_like(scale, 8)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = _half((high - low) / 15)
        zero = (-low / scale).round().clamp(0, 15)
    values = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    stands_for = ((values - zero[..., None]) * scale[..., None]).flatten(1)
    return values.flatten(1), scale, zero, stands_for


def _w8a8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = _half(weight.abs().amax(1, keepdim=True) / 127)
    values = (weight / scale).round().clamp(-127, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale


def _w4a16(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scale, _, stands_for = _in_groups(weight, is_symmetric=True)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _packed(values, 1), "weight_scale": scale, "weight_shape": shape}, stands_for


def _gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scale, zero, stands_for = _in_groups(weight, is_symmetric=True)
    parts = {"qweight": _packed(values.T, 0), "scales": scale.T, "qzeros": _packed(zero.T - 1, 1)}
    return parts | {"g_idx": (torch.arange(weight.shape[1]) // GROUP).int()}, stands_for


def _awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scale, zero, stands_for = _in_groups(weight, is_symmetric=False)

    def packed(value: Tensor) -> Tensor:
        return _packed(value.T.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 1)

    return {"qweight": packed(values), "scales": scale.T, "qzeros": packed(zero)}, stands_for


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    common = {"type": "int", "symmetric": True}
    group = {"targets": ["Linear"], "weights": common | {"dynamic": False} | weights}
    group["input_activations"] = inputs and common | inputs
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_INT8 = {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "token", "dynamic": True}
_INT4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}, None
_FOUR_BITS = {"bits": 4, "group_size": GROUP}

KINDS: dict[str, tuple[Callable[[Tensor], tuple[dict[str, Tensor], Tensor]], dict[str, Any]]] = {
    "w8a8": (_w8a8, _compressed("int-quantized", *_INT8)),
    "w4a16": (_w4a16, _compressed("pack-quantized", *_INT4)),
    "gptq": (_gptq, _FOUR_BITS | {"quant_method": "gptq", "desc_act": False, "sym": True, "lm_head": False}),
    "awq": (_awq, _FOUR_BITS | {"quant_method": "awq", "zero_point": True, "version": "gemm"}),
}

"""Loads a safetensors checkpoint into the model, one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from neaptide.executors.torch.models.base import Destination, TorchModel
from neaptide.models.checkpoint import find_weight_files
from neaptide.models.config import DecoderConfig, UnsupportedModelError
from neaptide.models.weights_header import read_headers

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_DERIVED = (
    ".rotary_emb.inv_freq",
    *(f".{attention}.{mask}" for attention in ("attn", "attention") for mask in ("bias", "masked_bias")),
)
"""Ends of names of tensors that follow from the configuration; old exporters store them."""


def check_shapes(model: TorchModel, model_dir: Path) -> None:
    """Compares the checkpoint with a model on the device ``meta``, which has shapes and no memory.

    Raises:
        UnsupportedModelError: a tensor is missing or of another shape.
    """
    destinations = model.destinations()
    headers = read_headers(find_weight_files(model_dir))
    headers = {_name_in(model, name, destinations): header for name, header in headers.items()}
    missing = sorted(destinations.keys() - headers.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnsupportedModelError(f"the checkpoint lacks {missing[0]}{more}")
    for name, destination in destinations.items():
        if headers[name].shape != destination.shape:
            raise UnsupportedModelError(
                f"{name} has shape {list(headers[name].shape)}, config.json says {list(destination.shape)}"
            )


def load_weights(model: TorchModel, model_dir: Path) -> None:
    """Fills ``model`` from ``model_dir``, converting each tensor to the model's dtype and device.

    ``check_shapes`` comes first.

    Raises:
        UnsupportedModelError: a tensor is unknown or not float, or a file is damaged.
    """
    destinations = model.destinations()
    for path in find_weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118 - not a dict
                    name = _name_in(model, stored, destinations)
                    if name not in destinations:
                        if name.endswith(_DERIVED) or _is_tied_copy(model, name):
                            continue
                        raise UnsupportedModelError(f"{path.name}: unexpected tensor {stored}")
                    tensor = file.get_tensor(stored)
                    if tensor.dtype not in _FLOAT_DTYPES:
                        raise UnsupportedModelError(f"{path.name}: {stored} is {tensor.dtype}: only float weights")
                    destinations[name].fill(tensor)
        except SafetensorError as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from error


def _name_in(model: TorchModel, stored: str, destinations: Mapping[str, Destination]) -> str:
    """The model's name for a tensor of the checkpoint.

    A checkpoint may lack the prefix, or have ``lm_head`` for the output projection whatever its family calls it.
    """
    if stored in destinations or not isinstance(model.config, DecoderConfig):
        return stored
    names = model.config.names
    others = (names.prefix + stored, stored.replace("lm_head.", f"{names.head}.", 1))
    return next((name for name in others if name in destinations), stored)


def _is_tied_copy(model: TorchModel, name: str) -> bool:
    """Whether this is the output projection of a model that uses its embedding instead."""
    head = model.config.names.head if isinstance(model.config, DecoderConfig) else "lm_head"
    return model.config.tie_word_embeddings and name in ("lm_head.weight", f"{head}.weight")

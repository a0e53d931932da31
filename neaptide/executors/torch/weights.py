"""Loads a safetensors checkpoint into the model, one tensor at a time."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from neaptide.executors.torch.models.base import TorchModel
from neaptide.models.checkpoint import find_weight_files
from neaptide.models.config import UnsupportedModelError
from neaptide.models.weights_header import read_headers

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_shapes(model: TorchModel, model_dir: Path) -> None:
    """Compares the checkpoint with a model on the device ``meta``, which has shapes and no memory.

    Raises:
        UnsupportedModelError: a tensor is missing or of another shape.
    """
    headers = read_headers(find_weight_files(model_dir))
    destinations = model.destinations()
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
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for path in find_weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name in ignored or name.endswith(".rotary_emb.inv_freq"):  # derived; old exporters store it
                        continue
                    if name not in destinations:
                        raise UnsupportedModelError(f"{path.name}: unexpected tensor {name}")
                    tensor = file.get_tensor(name)
                    if tensor.dtype not in _FLOAT_DTYPES:
                        raise UnsupportedModelError(f"{path.name}: {name} is {tensor.dtype}: only float weights")
                    destinations[name].fill(tensor)
        except SafetensorError as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from error

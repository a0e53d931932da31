"""Loads a safetensors checkpoint into the model, one tensor at a time."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from neaptide.executors.torch.models.base import TorchModel
from neaptide.models.checkpoint import find_weight_files
from neaptide.models.config import UnsupportedModelError

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_weights(model: TorchModel, model_dir: Path) -> None:
    """Fills ``model`` from ``model_dir``, converting each tensor to the model's dtype and device.

    Raises:
        UnsupportedModelError: a tensor is missing, unknown, not float, or of the wrong shape; or a file is damaged.
    """
    destinations = model.destinations()
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    loaded: set[str] = set()
    for path in find_weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name in ignored or name.endswith(".rotary_emb.inv_freq"):  # derived; old exporters store it
                        continue
                    if name not in destinations:
                        raise UnsupportedModelError(f"{path.name}: unexpected tensor {name}")
                    shape = tuple(file.get_slice(name).get_shape())
                    if shape != destinations[name].shape:
                        raise UnsupportedModelError(
                            f"{path.name}: {name} has shape {list(shape)}, config.json says "
                            f"{list(destinations[name].shape)}"
                        )
                    tensor = file.get_tensor(name)
                    if tensor.dtype not in _FLOAT_DTYPES:
                        raise UnsupportedModelError(f"{path.name}: {name} is {tensor.dtype}: only float weights")
                    view = destinations[name].view
                    view.copy_(tensor.reshape(view.shape))
                    loaded.add(name)
        except SafetensorError as error:
            raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from error
    missing = sorted(destinations.keys() - loaded)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnsupportedModelError(f"the checkpoint lacks {missing[0]}{more}")

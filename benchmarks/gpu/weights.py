"""Temporary model directories with random weights."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu.random_llama import LLAMA_8B, TINY, LlamaShape, write_model_dir, write_tokenizer

BYTES_PER_PARAMETER = 2
SPARE_DISK = 1.1


@contextlib.contextmanager
def random_model(device: torch.device, *, dry: bool, progress: Callable[[str], None]) -> Iterator[Path]:
    """Writes a model of Llama-3.1-8B's shape in bf16, or a tiny one. The weights are drawn on ``device``, whose memory
    is free again afterwards.

    Raises:
        RuntimeError: there is too little disk space.
    """
    name, shape = ("llama-tiny", TINY) if dry else ("llama-3.1-8b", LLAMA_8B)
    with tempfile.TemporaryDirectory() as directory:
        _check_disk(Path(directory), shape)
        model = Path(directory, name)  # gives a profile its model name
        model.mkdir()
        write_model_dir(model, shape, torch.bfloat16, device)
        write_tokenizer(model, shape.vocab)
        progress("random weights are written")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield model


def tiny_model(directory: Path, device: torch.device) -> Path:
    """Writes a model that is quick to check, into its own folder in ``directory``."""
    model = directory / "llama-tiny"
    model.mkdir()
    write_model_dir(model, TINY, torch.bfloat16, device)
    write_tokenizer(model, TINY.vocab)
    return model


def _check_disk(directory: Path, shape: LlamaShape) -> None:
    parameters = sum(torch.Size(size).numel() for _, size in shape.tensors())
    needed, free = SPARE_DISK * BYTES_PER_PARAMETER * parameters, shutil.disk_usage(directory).free
    if free < needed:
        raise RuntimeError(
            f"the weights need {needed / 1e9:.0f} GB in {tempfile.gettempdir()}, {free / 1e9:.0f} are free; "
            "set TMPDIR to another folder"
        )

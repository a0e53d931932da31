"""``neaptide calibrate`` on random weights.

It runs in a process of its own: the memory of the stages before is free again, and it can be ended in time. Started as
a module, this is the command alone: the whole command line would want packages that a bare machine lacks.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.random_llama import LLAMA_8B, TINY, LlamaShape, write_model_dir

BYTES_PER_PARAMETER = 2
SPARE_DISK = 1.1


def calibrate(
    device: torch.device, profile: Path, *, dry: bool, timeout_s: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Writes ``profile`` and returns what is in it.

    Raises:
        RuntimeError: too little disk for the weights, or the command failed.
        subprocess.TimeoutExpired: it was not done after ``timeout_s``.
    """
    name, shape = ("llama-tiny", TINY) if dry else ("llama-3.1-8b", LLAMA_8B)
    with tempfile.TemporaryDirectory() as directory:
        _check_disk(Path(directory), shape)
        model = Path(directory, name)  # the profile takes the model's name from it
        model.mkdir()
        write_model_dir(model, shape, torch.bfloat16, device)
        progress("random weights are written")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        command = [sys.executable, "-m", "benchmarks.gpu.calibration", "calibrate", "--model", str(model)]
        command += ["--device", device.type, "--out", str(profile), *(["--quick"] if dry else [])]
        status = subprocess.run(command, timeout=timeout_s, check=False).returncode
    if status:
        raise RuntimeError(f"neaptide calibrate ended with status {status}")
    found: dict[str, Any] = json.loads(profile.read_text(encoding="utf-8"))
    return found


def _check_disk(directory: Path, shape: LlamaShape) -> None:
    parameters = sum(torch.Size(size).numel() for _, size in shape.tensors())
    needed, free = SPARE_DISK * BYTES_PER_PARAMETER * parameters, shutil.disk_usage(directory).free
    if free < needed:
        raise RuntimeError(
            f"the weights need {needed / 1e9:.0f} GB in {tempfile.gettempdir()}, {free / 1e9:.0f} are free; "
            "TMPDIR names another folder"
        )


def main() -> int:
    from neaptide.commands import calibrate as command

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args()
    status: int = args.func(args)
    return status


if __name__ == "__main__":
    sys.exit(main())

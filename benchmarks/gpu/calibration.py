"""Runs ``neaptide calibrate`` on random weights.

It runs in its own process, so that earlier stages' memory is free and it can be stopped in time. Run as a module, this
is that command alone: the whole command line needs packages that a bare machine lacks.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.weights import random_model

LOADING_S = 60.0
"""Time for loading the model, and for the fits at the end."""
MOST_S = 120.0


def calibrate(
    device: torch.device, profile: Path, *, dry: bool, timeout_s: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Writes ``profile`` and returns its content.

    Args:
        timeout_s: limit of the whole call. The time left after writing the weights, less ``LOADING_S``, is for
            measuring.

    Raises:
        RuntimeError: there is too little disk space for the weights, or the command failed.
        subprocess.TimeoutExpired: it took longer than ``timeout_s``.
    """
    end_s = time.monotonic() + timeout_s
    with random_model(device, dry=dry, progress=progress) as model:
        left_s = end_s - time.monotonic()
        command = [sys.executable, "-m", "benchmarks.gpu.calibration", "calibrate", "--model", str(model)]
        command += ["--device", device.type, "--out", str(profile)]
        budget_s = min(MOST_S, left_s - LOADING_S)
        command += ["--quick"] if dry or budget_s <= 0 else ["--budget-s", f"{budget_s:.0f}"]
        status = subprocess.run(command, timeout=left_s, check=False).returncode
    if status:
        raise RuntimeError(f"neaptide calibrate ended with status {status}")
    found: dict[str, Any] = json.loads(profile.read_text(encoding="utf-8"))
    return found


def main() -> int:
    from neaptide.commands import calibrate as command

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args()
    status: int = args.func(args)
    return status


if __name__ == "__main__":
    sys.exit(main())

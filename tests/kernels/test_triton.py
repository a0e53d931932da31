"""Triton's kernels under its interpreter: one process for all files, for Triton reads on import how it is to run."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

INSIDE = Path(__file__).parent / "interpreted"
REPOSITORY = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: it has wheels for Linux only"
)


needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None and Version(version("triton")) < Version("3.9"),
    reason="older interpreters take no loop bounds from memory with numpy 2.4: seen with 3.6.0, not with 3.9.0",
)


@needs_triton
@needs_interpreter
def test_kernels_by_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(INSIDE / "pytest.ini")]
    done = subprocess.run(
        [*command, str(INSIDE)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "TRITON_INTERPRET": "1"},
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]

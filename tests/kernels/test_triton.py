"""Triton's kernels under its interpreter: one process for all files, for Triton reads on import how it is to run."""

import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.inside import run_inside

INSIDE = Path(__file__).parent / "interpreted"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: it has wheels for Linux only"
)


needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None and Version(version("triton")) < Version("3.9"),
    reason="older interpreters take no loop bounds from memory with numpy 2.4: seen with 3.6.0, not with 3.9.0",
)


@needs_triton
@needs_interpreter
@pytest.mark.parametrize("which", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_kernels_by_the_interpreter(which: str) -> None:
    environment = {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": f'-m "{which}"'}
    printed = run_inside(sys.executable, INSIDE, environment=environment)
    assert "skipped" not in printed.splitlines()[-1], printed[-2000:]

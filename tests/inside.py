"""Tests that run in a pytest of their own: on another interpreter, or in another environment."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def run_inside(
    python: str, directory: Path, *tests: str, environment: Mapping[str, str], stop_early: bool = False
) -> str:
    """Runs tests of a directory that has a ``pytest.ini``, all of them unless some are named; returns what was
    printed. Fails if one of them does."""
    options = ["-q", "-p", "no:cacheprovider", "-c", str(directory / "pytest.ini"), *(["-x"] if stop_early else [])]
    done = subprocess.run(
        [python, "-m", "pytest", *options, *(str(directory / test) for test in tests or (".",))],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout

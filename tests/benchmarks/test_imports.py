"""Every benchmark finds what it imports of the package. Most of them run too long for a test."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEED_MORE = ("neaptide.executors.vllm", "neaptide.kernels")
"""Modules that need vLLM or Triton."""


def imported(path: Path) -> list[tuple[str, str]]:
    """(module, name) of all that a file imports from the package, at any depth."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("neaptide.")
        for alias in node.names
        if not node.module.startswith(NEED_MORE)
    ]


def exists(module: str, name: str) -> bool:
    found = import_module(module)
    return hasattr(found, name) or (hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None)


@pytest.mark.parametrize("folder", ["benchmarks", "lab/benchmarks", "tools"])
def test_what_is_imported_exists(folder: str) -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module, name in imported(path)
        if not exists(module, name)
    ]
    assert not missing

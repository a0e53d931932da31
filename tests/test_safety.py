"""What the source never does, and the versions below which known holes are open."""

import ast
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "neaptide"
BANNED_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "code", "yaml"}
BANNED_ARGUMENTS = {"shell", "trust_remote_code"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "os.system", "os.popen"}
EDGE_FOLDERS = ("edge", "openai", "routes", "text")
EDGE_FILES = ("app", "batches/lines", "batches/multipart", "batches/checking/create", "batches/checking/validate")
"""What a caller sends passes through these."""
FLOORS = {"starlette": "1.3.1", "python-multipart": "0.0.30", "h11": "0.16"}


def nodes(path: Path) -> Iterator[ast.AST]:
    yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def runs_data_as_code(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return bool({alias.name.partition(".")[0] for alias in node.names} & BANNED_MODULES)
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
        return node.module.partition(".")[0] in BANNED_MODULES
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in BANNED_CALLS or any(word.arg in BANNED_ARGUMENTS for word in node.keywords)
    return False


@pytest.mark.parametrize(
    "source",
    [
        "import os, pickle",
        "from marshal import loads",
        "eval(text)",
        "torch.load(path)",
        "run(command, shell=True)",
        "load(trust_remote_code=False)",
    ],
)
def test_what_runs_data_as_code_is_seen(source: str) -> None:
    assert any(map(runs_data_as_code, ast.walk(ast.parse(source))))


def test_nothing_runs_data_as_code() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 200
    found = [f"{path}:{node.lineno}" for path in paths for node in nodes(path) if runs_data_as_code(node)]  # type: ignore[attr-defined]
    assert not found


def test_no_assert_guards_input() -> None:
    server = PACKAGE / "server"
    paths = [server / f"{name}.py" for name in EDGE_FILES]
    for folder in EDGE_FOLDERS:
        paths += (server / folder).glob("*.py")
    assert len(paths) > 30
    found = [f"{path}:{node.lineno}" for path in paths for node in nodes(path) if isinstance(node, ast.Assert)]
    assert not found


@pytest.mark.parametrize(("name", "floor"), FLOORS.items())
def test_versions_with_known_holes_are_not_accepted(name: str, floor: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = [r for r in map(Requirement, project["dependencies"]) if r.name == name]
    (lowest,) = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
    assert Version(floor) <= lowest
    assert lowest <= Version(version(name))

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
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "os.system", "os.popen"}
EDGE = ("app", "auth", "chat_template", "errors", "generation", "hosts", "jsonbody", "middleware", "prepare", "prompts")
EDGE_FILES = [
    *(PACKAGE / "server" / f"{name}.py" for name in (*EDGE, "schemas", "transport")),
    *(PACKAGE / "server" / "routes").glob("*.py"),
    *(PACKAGE / "server" / "batches" / f"{name}.py" for name in ("create", "multipart", "validate", "lines")),
]
FLOORS = {"starlette": "1.3.1", "python-multipart": "0.0.30", "h11": "0.16"}


def nodes(path: Path) -> Iterator[ast.AST]:
    yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_that_runs_data_as_code(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & BANNED_MODULES
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            assert node.module.partition(".")[0] not in BANNED_MODULES
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in BANNED_CALLS
            assert not any(keyword.arg == "shell" for keyword in node.keywords)
            assert not any(keyword.arg == "trust_remote_code" for keyword in node.keywords)


@pytest.mark.parametrize("path", EDGE_FILES, ids=lambda path: path.name)
def test_no_assert_guards_input(path: Path) -> None:
    assert not any(isinstance(node, ast.Assert) for node in nodes(path))


@pytest.mark.parametrize(("name", "floor"), FLOORS.items())
def test_versions_with_known_holes_are_not_accepted(name: str, floor: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = [r for r in map(Requirement, project["dependencies"]) if r.name == name]
    (lowest,) = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
    assert Version(floor) <= lowest
    assert lowest <= Version(version(name))

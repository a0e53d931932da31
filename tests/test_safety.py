"""What the source never does, and the versions below which known holes are open."""

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tools.syntax import syntax_tree

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "neaptide"
FLOORS = {"starlette": "1.3.1", "python-multipart": "0.0.30", "h11": "0.16"}


def is_refused(source: str, place: str) -> bool:
    """Whether ``ruff check`` complains of a line, were it in that file."""
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", "--stdin-filename", place, "-"]
    used = f"{source}\n"
    return (
        subprocess.run(command, cwd=REPOSITORY, input=used, text=True, capture_output=True, check=False).returncode == 1
    )


@pytest.mark.parametrize(
    "source",
    [
        "import pickle as os",
        "from marshal import loads as os",
        "import torch\n\ntorch.load(__file__)",
        "import os\n\nos.system(__file__)",
        "import subprocess\n\nsubprocess.run(__file__, shell=True, check=True)",
        "eval(__file__)",
        "exec(__file__)",
    ],
)
def test_nothing_runs_data_as_code(source: str) -> None:
    assert is_refused(source, "neaptide/server/app.py")


def test_nothing_runs_code_of_a_model_repository() -> None:
    """Nor compiles a text; no rule of ruff sees these."""
    found = [
        f"{path}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(syntax_tree(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id in ("compile", "__import__"))
            or any(word.arg == "trust_remote_code" for word in node.keywords)
        )
    ]
    assert found == []


@pytest.mark.parametrize("place", ["app.py", "http/auth.py", "openai/prepare.py", "batches/checking/create.py"])
def test_no_assert_guards_input(place: str) -> None:
    assert is_refused("assert __file__", f"neaptide/server/{place}")


def test_an_assert_elsewhere_is_admitted() -> None:
    assert not is_refused("assert __file__", "neaptide/server/engine_client/supervisor.py")


@pytest.mark.parametrize(("name", "floor"), FLOORS.items())
def test_versions_with_known_holes_are_not_accepted(name: str, floor: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    (requirement,) = [r for r in map(Requirement, listed) if r.name == name]
    (lowest,) = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
    assert Version(floor) <= lowest
    assert lowest <= Version(version(name))

"""What ``pip install neaptide-vllm`` changes in vLLM's environment: nothing that is there."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.executors.vllm.interpreter import PYTHON, REPOSITORY, needs_vllm

NEW = {"alembic", "neaptide", "sqlalchemy"}
"""Packages that vLLM does not have."""
BROUGHT = NEW | {"mako", "neaptide-vllm"}
"""All that the installation adds."""
OPTIONAL = {"greenlet"}
"""Packages that only some versions of sqlalchemy bring."""
PARTS = ("pyproject.toml", "README.md", "LICENSE", "neaptide")
"""Files and folders of a build of neaptide."""


def with_vllm(test: Callable[..., None]) -> Callable[..., None]:
    """The test with all marks of tests that need vLLM."""
    for mark in needs_vllm:
        test = mark(test)
    return test


def project(folder: Path) -> Any:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required() -> list[Requirement]:
    """Requirements of the plug-in and of the part of neaptide that it brings."""
    found = project(REPOSITORY)["dependencies"] + project(REPOSITORY / "vllm-plugin")["dependencies"]
    return [Requirement(one) for one in found]


@pytest.mark.parametrize("requirement", required(), ids=str)
def test_no_requirement_has_an_upper_bound(requirement: Requirement) -> None:
    """vLLM's next release may bring any newer version."""
    assert {one.operator for one in requirement.specifier} == {">="}


@pytest.mark.parametrize(
    "requirement",
    [pytest.param(one, marks=needs_vllm) for one in required() if one.name.lower() not in NEW],
    ids=str,
)
def test_vllms_environment_meets_every_requirement_as_it_is(requirement: Requirement) -> None:
    program = "import importlib.metadata as m, json, sys; print(json.dumps(m.version(sys.argv[1])))"
    found = subprocess.run([PYTHON, "-P", "-c", program, requirement.name], capture_output=True, check=True)
    assert json.loads(found.stdout) in requirement.specifier


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a copy of vLLM's environment without what we add. Its files are links: pip replaces, and writes
    into none."""
    copy = tmp_path_factory.mktemp("vllm") / "venv"
    shutil.copytree(PYTHON.parents[1], copy, symlinks=True, copy_function=os.link)
    python = copy / "bin" / "python"
    pip(python, "uninstall", "--yes", *sorted(BROUGHT | OPTIONAL))
    return python


def pip(python: Path, *words: str) -> str:
    done = subprocess.run([python, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def versions(python: Path) -> dict[str, str]:
    """Versions of all distributions of an environment, by name."""
    return {one["name"].lower(): one["version"] for one in json.loads(pip(python, "list", "--format", "json"))}


def wheels(directory: Path) -> list[str]:
    """Wheels of both distributions, built from copies: a build leaves files in its folder."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    ours, plugin = directory / "neaptide", directory / "vllm-plugin"
    ours.mkdir()
    for part in PARTS:
        copy = shutil.copy if (REPOSITORY / part).is_file() else partial(shutil.copytree, ignore=ignore)
        copy(REPOSITORY / part, ours / part)
    shutil.copytree(REPOSITORY / "vllm-plugin", plugin, ignore=ignore)
    for source in (ours, plugin):
        pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(directory), str(source))
    found = [str(path) for path in directory.glob("*.whl")]
    assert len(found) == 2
    return found


@with_vllm
@pytest.mark.timeout(1800)
def test_an_installation_changes_no_version_of_vllms_environment(clean: Path, tmp_path: Path) -> None:
    before = versions(clean)
    assert not before.keys() & (BROUGHT | OPTIONAL)
    pip(clean, "install", *wheels(tmp_path))
    after = versions(clean)
    assert {name: version for name, version in after.items() if name in before} == before
    assert after.keys() - before.keys() - OPTIONAL == BROUGHT
    program = "import neaptide_vllm.batches.plugin, neaptide_vllm.scheduling.coserving as c; print(c.__file__)"
    done = subprocess.run([clean, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(clean.parents[1]) in done.stdout

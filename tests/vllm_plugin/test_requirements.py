"""What ``pip install neaptide-vllm`` changes in vLLM's environment: nothing that is there."""

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.executors.vllm.interpreter import PYTHON, REPOSITORY, needs_vllm

NEW = {"alembic", "neaptide", "sqlalchemy"}
"""Packages that vLLM does not have."""


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

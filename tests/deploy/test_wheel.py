"""What is installed: the package, and nothing of the laboratory."""

import tomllib
from pathlib import Path

from setuptools import find_packages

REPOSITORY = Path(__file__).parents[2]


def test_the_wheel_has_no_laboratory_and_no_experiments() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = find_packages(str(REPOSITORY), include=settings["include"])
    assert "neaptide.simulation" in found
    assert {name.split(".")[0] for name in found} == {"neaptide"}
    assert not [name for name in found if "experiment" in name or "lab" in name.split(".")]

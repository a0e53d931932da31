"""What is said where an optional part is not installed."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from neaptide import cli, extras
from neaptide.extras import EXTRA_OF, MissingPartError, check_part
from neaptide.launch.early_checks import check_parts
from neaptide.server.settings import Settings

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTED_AS = {"pyzmq": "zmq", "python-multipart": "python_multipart", "sqlalchemy": "sqlalchemy"}
"""Packages whose import name is another."""


def import_names(requirements: list[str]) -> Iterator[str]:
    for requirement in requirements:
        (name,) = re.findall(r"^[\w-]+", requirement)
        yield IMPORTED_AS.get(name.lower(), name)


@pytest.mark.parametrize(("package", "extra"), EXTRA_OF.items())
def test_the_extra_that_is_named_brings_the_package(package: str, extra: str) -> None:
    assert package in import_names(PROJECT["optional-dependencies"][extra])


@pytest.mark.parametrize("package", EXTRA_OF)
def test_the_base_installation_needs_none_of_them(package: str) -> None:
    assert package not in import_names(PROJECT["dependencies"])


def test_the_flags_of_every_command_are_read_without_them() -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({list(EXTRA_OF)})); from neaptide import cli; cli.build_parser()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_part_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with pytest.raises(MissingPartError, match=r"^torch is not installed: pip install 'neaptide\[torch\]'$"):
        check_part("torch")


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        (Settings(), "torch"),
        (Settings(executor="sim"), "fastapi"),
        (Settings(engine_python="python"), "fastapi"),
        (Settings(executor="sim", store="postgresql://host/database"), "psycopg"),
    ],
)
def test_a_start_looks_for_what_its_settings_need(
    settings: Settings, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(MissingPartError, match=f"^{package} is not installed"):
        check_parts(settings)


def test_a_server_without_its_executor_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "neaptide serve: torch is not installed: pip install 'neaptide[torch]'\n"


def test_a_module_that_an_import_lacks_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports_in_vain(settings: Settings) -> int:
        raise ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy.orm")

    monkeypatch.setattr("neaptide.launch.serve.serve", imports_in_vain)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "neaptide serve: sqlalchemy is not installed: pip install 'neaptide[server]'\n"


def test_a_module_that_no_extra_brings_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def imports_in_vain(settings: Settings) -> int:
        raise ModuleNotFoundError("No module named 'neaptide.nowhere'", name="neaptide.nowhere")

    monkeypatch.setattr("neaptide.launch.serve.serve", imports_in_vain)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["serve"])

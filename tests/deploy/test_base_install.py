"""``pip install .`` into an empty environment, without any extra: what runs there, and what the rest says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neaptide.extras import EXTRA_OF
from tests.e2e.conftest import SIM
from tests.e2e.server import RunningServer

REPOSITORY = Path(__file__).parents[2]
FILES = ("pyproject.toml", "README.md", "LICENSE")
"""What a build needs, beside the package."""
SIMULATED = ["--online", "azure_conv_2023", "--online-window", "0:5", "--offline", "sharegpt_lengths"]
SIMULATED += ["--profile", "h100-80g-llama-3.1-8b"]
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a fresh environment with the package as a wheel."""
    directory = tmp_path_factory.mktemp("base")
    source = directory / "source"
    source.mkdir()
    shutil.copytree(REPOSITORY / "neaptide", source / "neaptide", ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPOSITORY / name, source)
    subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True)
    programs = directory / "venv" / "bin"
    command = [
        str(programs / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(REPOSITORY / "requirements.lock"),
    ]
    done = subprocess.run([*command, str(source)], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return programs


def run(base: Path, *words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NEAPTIDE_", "PYTHON"))}
    return subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, check=False, env=environment | {"PATH": str(base)}
    )


def succeeds(base: Path, *words: str, cwd: Path) -> str:
    done = run(base, str(base / words[0]), *words[1:], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_package_of_an_extra_is_there(base: Path, tmp_path: Path) -> None:
    program = f"from importlib.util import find_spec; print(*filter(find_spec, {list(EXTRA_OF)}))"
    assert succeeds(base, "python", "-c", program, cwd=tmp_path).split() == []


def test_it_simulates(base: Path, tmp_path: Path) -> None:
    succeeds(base, "neaptide", "simulate", "--policy", "neaptide", *SIMULATED, "--json", "out.json", cwd=tmp_path)
    assert (tmp_path / "out.json").stat().st_size > 100


def test_it_plans(base: Path, tmp_path: Path) -> None:
    words = [
        "--online",
        "azure_conv_2023",
        "--online-window",
        "0:60",
        "--peak-s",
        "20",
        "--margin-s",
        "5",
        "--json",
        "plan.json",
    ]
    succeeds(base, "neaptide", "plan", *words, cwd=tmp_path)
    assert (tmp_path / "plan.json").stat().st_size > 100


def test_it_loads_a_server_and_sends_batches(base: Path, tmp_path: Path) -> None:
    with RunningServer(tmp_path / "server", env=SIM) as server:
        address = server.base_url.removesuffix("/v1")
        load = ["--server", address, "--rate", "5", "--duration", "2"]
        assert "ttft" in succeeds(base, "neaptide", "loadgen", "synth", *load, cwd=tmp_path).lower()
        words = ["submit", str(REPOSITORY / "examples" / "batch.jsonl"), "--base-url", address, "--wait"]
        succeeds(base, "neaptide", "batch", *words, cwd=tmp_path)


def test_the_gateway_is_there(base: Path, tmp_path: Path) -> None:
    succeeds(base, "python", "-c", "import neaptide.cluster.launch.gateway", cwd=tmp_path)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["serve"], "neaptide serve: torch is not installed: pip install 'neaptide[torch]'\n"),
        (["demo"], "neaptide demo: torch is not installed: pip install 'neaptide[torch]'\n"),
        (
            ["serve", "--executor", "sim"],
            "neaptide serve: fastapi is not installed: pip install 'neaptide[server]'\n",
        ),
        (
            ["calibrate", "--out", "p.json"],
            "neaptide calibrate: torch is not installed: pip install 'neaptide[torch]'\n",
        ),
    ],
)
def test_a_missing_part_is_one_line(words: list[str], complaint: str, base: Path, tmp_path: Path) -> None:
    done = run(base, str(base / "neaptide"), *words, cwd=tmp_path)
    assert (done.returncode != 0, done.stderr) == (True, complaint)

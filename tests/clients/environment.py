"""Other people's clients, each in an environment of its own, so that this one and its lock stay as they are."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.patience import PATIENCE_S

HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ.get("CLIENT_ENVIRONMENTS", HERE.parents[1] / ".clients"))
"""Filled by ``make clients``."""
_OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Clients that would look for files on the net; they need none of them."""


def _run(
    command: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | _OFFLINE | (env or {}),
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def _marks(directory: Path, *needed: Path) -> list[pytest.MarkDecorator]:
    """For ``pytestmark``: these tests are an optional group, skipped where the environment is missing."""
    missing = not all(path.exists() for path in needed)
    return [pytest.mark.clients, pytest.mark.skipif(missing, reason=f"no {directory}: run `make clients`")]


@dataclass(frozen=True, slots=True)
class ClientEnvironment:
    """The virtual environment that ``tests/clients/NAME.txt`` describes."""

    name: str

    @property
    def _bin(self) -> Path:
        return ENVIRONMENTS / self.name / "bin"

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        return _marks(self._bin.parent, self._bin / "python")

    def run(
        self, program: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a program of the environment. Fails the test if its status is not 0."""
        return _run([self._bin / program, *arguments], env, cwd)

    def start(self, program: str, *arguments: str, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Starts a program of the environment."""
        command = [self._bin / program, *arguments]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | _OFFLINE)

    def drive(self, scenario: str, base_url: str) -> dict[str, Any]:
        """What ``scripts/drive_NAME.py`` saw: its last line, as JSON."""
        script = HERE / "scripts" / f"drive_{self.name}.py"
        done = self.run("python", str(script), scenario, base_url)
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return seen


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """The packages that ``tests/clients/NAME.json`` describes, a ``package.json``."""

    name: str

    @property
    def _directory(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        node = Path(shutil.which("node") or "no node")
        return _marks(self._directory, self._directory / "node_modules", node)

    def drive(self, scenario: str, base_url: str) -> Any:
        """What ``scripts/drive_NAME.mjs`` saw: its last line, as JSON."""
        script = f"drive_{self.name}.mjs"
        shutil.copy(HERE / "scripts" / script, self._directory)  # packages are looked for beside the script
        return json.loads(_run(["node", self._directory / script, scenario, base_url]).stdout.splitlines()[-1])

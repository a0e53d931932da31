"""A model is known by what it is, not by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from neaptide.server.engine_client.fingerprint import model_fingerprint
from tests.server.conftest import MODEL_DIR

pytestmark = pytest.mark.acceptance("A22", "fingerprint of a changed model")


def change_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))


def change_weights(model: Path) -> None:
    """As fine-tuning does: all of them, and neither names nor sizes."""
    weights = bytearray((model / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(weights[:8], "little")
    weights[header:] = bytes(byte ^ 1 for byte in weights[header:])
    (model / "model.safetensors").write_bytes(weights)


def change_template(model: Path) -> None:
    with (model / "chat_template.jinja").open("a") as f:
        f.write("{# another #}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))


def test_a_copy_is_the_same_model(model: Path) -> None:
    assert model_fingerprint(model) == model_fingerprint(MODEL_DIR)


@pytest.mark.parametrize("change", [change_config, change_weights, change_template])
def test_a_changed_model_is_another_one(model: Path, change: Callable[[Path], None]) -> None:
    change(model)
    assert model_fingerprint(model) != model_fingerprint(MODEL_DIR)

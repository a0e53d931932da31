"""A gateway reads the tokenizer of a model. It needs neither weights nor an executor that knows the family."""

import json
import shutil
from pathlib import Path

import pytest

from neaptide.cluster.launch.gateway import build_gateway
from neaptide.launch.serve import LaunchError, embedded_model_path
from neaptide.server.settings import Settings


@pytest.fixture
def unknown_family(tmp_path: Path) -> Settings:
    """A model of a family that none of our executors has, without its weights."""
    directory = tmp_path / "model"
    shutil.copytree(embedded_model_path(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["OfTomorrowForCausalLM"]}))
    return Settings(model=str(directory))


async def test_a_gateway_for_servers_elsewhere_needs_the_tokenizer_alone(unknown_family: Settings) -> None:
    gateway = build_gateway(unknown_family, has_engines=False)
    try:
        assert gateway.context.model_id == "model"
        assert gateway.context.tokenizer.encode("2+2")
    finally:
        await gateway.close()


async def test_a_gateway_of_replicas_on_this_machine_says_at_once_that_they_cannot_start(
    unknown_family: Settings,
) -> None:
    with pytest.raises(LaunchError, match="OfTomorrowForCausalLM"):
        build_gateway(unknown_family)

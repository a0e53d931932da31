"""A family is a parser and a class: what is plugged in is served."""

import json
import pkgutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from neaptide.executors.torch.models.decoder import Decoder
from neaptide.models import registry
from neaptide.models.config import ModelConfig
from neaptide.models.families import llama
from neaptide.models.fields import RawConfig
from neaptide.models.registry import FAMILIES, Family
from tests.executors.driver import Driver, assert_greedy, make_executor, random_prompt, write_checkpoint


class ScaledDecoder(Decoder):
    """Another family: its embeddings come out doubled, its checkpoint holds them halved."""

    def forward(self, token_ids, positions, kv_cache, plan):  # type: ignore[no-untyped-def]
        hidden = 2 * self.embedding.index_select(0, token_ids)
        rotation = self.rotary.at(positions)
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            layer.forward_(hidden, rotation, layer_cache, plan)
        return hidden


def parse_scaled(raw: RawConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    fields = llama.llama(raw | {"hidden_size": raw["width"]}, eos_token_ids)
    return replace(fields, architecture="ScaledForCausalLM")


def test_every_family_has_its_class() -> None:
    for family in FAMILIES.values():
        assert hasattr(pkgutil.resolve_name(family.torch_class), "destinations")


def test_a_family_that_is_plugged_in_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_checkpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"architectures": ["ScaledForCausalLM"], "width": raw.pop("hidden_size")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] / 2
    save_file(tensors, tmp_path / "model.safetensors")
    family = Family(parse_scaled, f"{__name__}:ScaledDecoder")
    monkeypatch.setitem(registry.FAMILIES, "ScaledForCausalLM", family)
    driver = Driver(make_executor(tmp_path))
    track = driver.add("r", random_prompt(20, 1))
    driver.run(8)
    assert assert_greedy(model, track) > 0

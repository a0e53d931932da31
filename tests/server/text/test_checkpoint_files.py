"""Checkpoints as they are on the hub: end tokens and special tokens stand in any of several files."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from neaptide.commands.demo.lines import MAX_TOKENS, make_batch
from neaptide.data.skills import SKILLS, is_correct
from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig
from neaptide.engine.params import FinishReason
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.launch.serve import embedded_model_path, model_context
from neaptide.server.settings import Settings
from neaptide.server.text.tokenizer import Tokenizer
from tests.executors.engine_run import EngineRun
from tests.server.text.made import write_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)
ENDING = TEMPLATE.replace("m.content }}", "m.content }}{{ '<|end|>' }}\n")
PAD, END = 0, 5


def write_fine_tune(directory: Path, template: str, files: dict[str, Any]) -> Path:
    """The embedded model as a fine-tune: no file but those given names an end."""
    write_tokenizer(directory, template, eos_token=None)
    config = json.loads((directory / "config.json").read_text())
    config["eos_token_id"] = None
    (directory / "config.json").write_text(json.dumps(config))
    for name, entries in files.items():
        known = json.loads((directory / name).read_text()) if (directory / name).exists() else {}
        (directory / name).write_text(json.dumps(known | entries))
    return directory


@pytest.mark.parametrize(
    ("template", "files", "expected"),
    [
        (TEMPLATE, {"config.json": {"eos_token_id": 5}}, (END,)),
        (TEMPLATE, {"generation_config.json": {"eos_token_id": [5]}}, (END,)),
        (TEMPLATE, {"tokenizer_config.json": {"eos_token": "<|end|>"}}, (END,)),
        (TEMPLATE, {"tokenizer_config.json": {"eos_token": {"content": "<|end|>"}}}, (END,)),
        (TEMPLATE, {"special_tokens_map.json": {"eos_token": {"content": "<|end|>"}}}, (END,)),
        (ENDING, {}, (END,)),
        (ENDING, {"config.json": {"eos_token_id": 0}}, (PAD, END)),
        (TEMPLATE, {}, ()),
        (TEMPLATE + "<|bos|>", {}, ()),
        ("<|end|>{{ messages[0].content }}", {}, ()),
    ],
)
def test_ends_are_the_union_of_all_files(
    template: str, files: dict[str, Any], expected: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    write_fine_tune(directory, template, files)
    with caplog.at_level(logging.INFO):
        context, config = model_context(Settings(model=str(directory)), tmp_path / "data")
    assert context.eos_token_ids == config.executor.eos_token_ids == expected
    report = {line.partition(":")[0]: line for line in caplog.messages}
    for feature in ("stopping by itself", "structured output"):
        assert (f"{feature} (no file names an end token)" in report["off"]) == (not expected)
    assert list(report) == ["model", "context", "ends", "template", "off"]


@pytest.mark.parametrize(("shows", "parser"), [("", "none"), ("{{ tools }}", "hermes")])
def test_the_report_names_a_tool_parser_only_where_the_template_shows_tools(
    shows: str, parser: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    write_fine_tune(directory, TEMPLATE + shows, {})
    with caplog.at_level(logging.INFO):
        model_context(Settings(model=str(directory)), tmp_path / "data")
    assert f"template: default; tool calls: {parser}; reasoning: none" in caplog.messages


def as_phi3(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With its stacked projections."""
    for layer in [name.removesuffix("self_attn.q_proj.weight") for name in tensors if "q_proj" in name]:
        for stacked, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            folder = stacked.partition(".")[0]
            rows = [tensors.pop(f"{layer}{folder}.{part}_proj.weight") for part in parts]
            tensors[f"{layer}{stacked}.weight"] = torch.cat(rows)
    return tensors


def as_qwen2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With biases, of zero."""
    biased = [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
    return tensors | {name.replace("weight", "bias"): torch.zeros(len(tensors[name])) for name in biased}


FAMILIES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "Llama": lambda tensors: tensors,
    "Mistral": lambda tensors: tensors,
    "Phi3": as_phi3,
    "Qwen2": as_qwen2,
}
"""The embedded model's weights as each family writes them. Qwen3 and OPT compute something else."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_typical_fine_tune_stops(family: str, tmp_path: Path) -> None:
    """The configuration is the base model's, the end stands in the tokenizer's alone, and nothing else says more."""
    directory = tmp_path / "m"
    shutil.copytree(embedded_model_path(), directory)
    (directory / "generation_config.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    config |= {"eos_token_id": PAD, "architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    (directory / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    save_file(FAMILIES[family](load_file(directory / "model.safetensors")), directory / "model.safetensors")
    settings = Settings(model=str(directory), max_model_len=2048, profile="cpu-neaptide-tiny", device="cpu")
    context, engine = model_context(settings, tmp_path / "data")
    run = msgspec.structs.replace(engine.executor, num_threads=1)
    executor = TorchExecutor(run, CacheConfig(block_size=16, num_blocks=1024), MonotonicClock())
    cache = msgspec.structs.replace(engine.cache, block_size=16)
    alone = EngineRun(
        msgspec.structs.replace(engine, cache=cache), executor, eos_token_ids=executor.model_config.eos_token_ids
    )
    questions = make_batch(2 * len(SKILLS), seed=4)
    for index, question in enumerate(questions):
        prompt = context.tokenizer.encode_chat(question.messages)
        alone.add(f"{index}", prompt, max_tokens=MAX_TOKENS, ignore_eos=False)
    alone.finish()
    assert {end.finish_reason for end in alone.ends.values()} == {FinishReason.STOP}
    answers = [context.tokenizer.decode(alone.tokens[f"{index}"]) for index in range(len(questions))]
    assert sum(map(is_correct, questions, answers)) > 0.9 * len(questions)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"pad_token": "[PAD]", "eos_token": "<|im_end|>"}},
        {"tokenizer_config.json": {"extra_special_tokens": ["[A]", "[B]"]}},
        {"tokenizer_config.json": {"additional_special_tokens": ["[A]"], "image_token": "[I]"}},
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    "417": {"content": "[D]", "special": True, "normalized": False},
                    "416": {"content": "[C]", "special": False, "normalized": False},
                }
            }
        },
        {"special_tokens_map.json": {"pad_token": "[PAD]", "additional_special_tokens": ["[E]"]}},
        {"added_tokens.json": {"[G]": 417, "[F]": 416}, "special_tokens_map.json": {"pad_token": "[F]"}},
    ],
)
def test_added_tokens_are_those_of_transformers(files: dict[str, Any], tmp_path: Path) -> None:
    write_fine_tune(tmp_path, TEMPLATE, files)
    ours, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.added_tokens == reference.get_added_vocab()
    text = "a[PAD]<|im_end|>[A] [B][C][D][E] [F][G][I]b"
    assert ours.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)

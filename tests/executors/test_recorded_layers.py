"""Steps of a few tokens whose layers are one call in C: the same bits as call by call, or not taken."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from neaptide.executors.torch.models.llama import DecoderLayer, Llama
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.kernels.native import COMPILERS
from tests.executors.driver import EVERY_LOGPROB, Driver, Track, make_executor, write_family

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 20, "num_key_value_heads": 1},
}


def answers(executor: TorchExecutor) -> list[Track]:
    """Of six requests that come one after the other, so that steps have one to six tokens; long enough for a second
    block."""
    driver = Driver(executor)
    tracks: list[Track] = []
    for number, length in enumerate((5, 14, 1, 9, 3, 7)):
        tracks.append(driver.add(f"r{number}", [3 + (7 * number + 11 * i) % 120 for i in range(length)], EVERY_LOGPROB))
        driver.run(3 * number + 3)
    return tracks


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_call_by_call(family: str, tmp_path: Path) -> None:
    write_family(family, tmp_path, **FAMILIES[family])
    executor = make_executor(tmp_path)
    recorded = executor._runner.recorded
    assert sorted(recorded) == [1, 2, 3, 4, 5, 6, 7, 8]
    ours = answers(executor)
    executor._runner.recorded = {}
    assert [(track.output, track.logprobs) for track in ours] == [
        (track.output, track.logprobs) for track in answers(executor)
    ]


def test_they_are_what_computes(tmp_path: Path) -> None:
    """Decodes of a model whose layers could not by themselves."""
    write_family("llama", tmp_path)
    executor = make_executor(tmp_path)
    model, outputs = executor._runner.model, []
    assert isinstance(model, Llama)
    for layer_class in (DecoderLayer, type("Broken", (DecoderLayer,), {"forward_": None})):
        driver = Driver(executor)
        track = driver.add("it", [5, 4, 3, 9, 11])
        driver.run(1)
        model.layers[0].__class__ = layer_class
        driver.run(8)
        driver.finish("it")
        outputs.append(track.output)
        model.layers[0].__class__ = DecoderLayer
    assert outputs[0] == outputs[1]


class Doubling(DecoderLayer):
    """Something of torch's in a layer."""

    def adjust_(self, qkv: Tensor) -> None:
        qkv[:, : self.num_heads].mul_(2.0)


def test_layers_that_torch_has_a_part_in_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family("llama", tmp_path)
    monkeypatch.setattr("neaptide.executors.torch.models.llama.Llama.layer_class", Doubling)
    executor = make_executor(tmp_path)
    assert executor._runner.recorded == {}
    assert len(answers(executor)[0].output) == 18


@pytest.mark.parametrize(
    ("family", "changes"),
    [("opt", {}), ("llama", {"cpu_kernels": "torch"}), ("llama", {"num_blocks": 1, "block_size": 2})],
)
def test_where_they_cannot_be_had(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_family(family, tmp_path)
    assert make_executor(tmp_path, **changes)._runner.recorded == {}


def test_other_threads_than_at_start_compute_call_by_call(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    executor = make_executor(tmp_path)
    runner = executor._runner
    plan = runner.plan_attention(*(torch.tensor(each).numpy() for each in ([1], [1], [[0]])))
    assert runner.recorded[1].takes(plan)
    torch.set_num_threads(2)
    try:
        assert not runner.recorded[1].takes(plan)
    finally:
        torch.set_num_threads(1)

"""Steps whose layers are one call in C: the same bits as call by call, or not taken."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from neaptide.executors.torch.layers import products
from neaptide.executors.torch.layers.products import TILE_ROWS
from neaptide.executors.torch.models.decoder import Decoder, DecoderLayer
from neaptide.executors.torch.models.recorded import record_layers
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.kernels.native import COMPILERS
from neaptide.kernels.paged_attention import StepAttention, StepTables
from neaptide.kernels.row_quantization import ByteProduct
from tests.executors.driver import EVERY_LOGPROB, Driver, Track, make_executor, write_family

HAS_COMPILER = any(map(shutil.which, COMPILERS))
pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 20, "num_key_value_heads": 1},
    "smollm3": {"no_rope_layers": [0, 1], "pad_token_id": 0},
    "granite": {"residual_multiplier": 0.3, "attention_multiplier": 0.2},
}


def answers(executor: TorchExecutor) -> list[Track]:
    """Of six requests that come one after the other, so that steps have one to six decodes, and now and then a prompt
    beside them; long enough for a second block."""
    driver = Driver(executor)
    tracks: list[Track] = []
    for number, length in enumerate((5, 14, 1, 40, 3, 7)):
        tracks.append(driver.add(f"r{number}", [3 + (7 * number + 11 * i) % 120 for i in range(length)], EVERY_LOGPROB))
        driver.run(3 * number + 3)
    return tracks


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_call_by_call(family: str, tmp_path: Path) -> None:
    write_family(family, tmp_path, **FAMILIES[family])
    assert_same_bits(make_executor(tmp_path))


@pytest.mark.skipif(
    not HAS_COMPILER or not ByteProduct.takes(torch.float32, 64), reason="nothing multiplies bytes here"
)
def test_layers_of_8_bit_numbers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "UNMEASURED_BYTES", 1)
    monkeypatch.setattr(products, "choose", lambda seconds, **_: {1: list(next(iter(seconds.values())))[-1]})
    write_family("llama", tmp_path)
    executor = make_executor(tmp_path, quantization="w8a8")
    linears = executor._runner.model.linears()[:-1]
    assert all(isinstance(linear.product_of(1), ByteProduct) for linear in linears)
    assert_same_bits(executor)


def assert_same_bits(executor: TorchExecutor) -> None:
    recorded = executor._runner.recorded
    assert recorded is not None
    assert recorded.max_tokens == TILE_ROWS
    ours = answers(executor)
    executor._runner.recorded = None
    assert [(track.output, track.logprobs) for track in ours] == [
        (track.output, track.logprobs) for track in answers(executor)
    ]


def test_they_are_what_computes(tmp_path: Path) -> None:
    """Decodes of a model whose layers could not by themselves."""
    write_family("llama", tmp_path)
    executor = make_executor(tmp_path)
    model, outputs = executor._runner.model, []
    assert isinstance(model, Decoder)
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

    def forward_(self, hidden: Tensor, rotation: Tensor | None, kv_cache: Tensor, plan: StepAttention) -> None:
        super().forward_(hidden, rotation, kv_cache, plan)
        hidden.mul_(2.0)


def test_layers_that_torch_has_a_part_in_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family("llama", tmp_path)
    monkeypatch.setattr("neaptide.executors.torch.models.decoder.Decoder.layer_class", Doubling)
    executor = make_executor(tmp_path)
    assert executor._runner.recorded is None
    assert len(answers(executor)[0].output) == 18


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("opt", {}),
        ("olmo2", {}),
        ("gpt2", {}),
        ("arcee", {}),
        ("llama", {"cpu_kernels": "torch"}),
        ("llama", {"num_blocks": 1, "block_size": 2}),
    ],
)
def test_where_they_cannot_be_had(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_family(family, tmp_path)
    assert make_executor(tmp_path, **changes)._runner.recorded is None


def planned(executor: TorchExecutor, num_tokens: int) -> StepAttention:
    """Of a prompt whose tokens all lie in the first block."""
    lens = np.array([num_tokens])
    return executor._runner.plan_attention(lens, lens, StepTables.of(np.array([[0]])))


def test_other_threads_than_at_start_compute_call_by_call(tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    executor = make_executor(tmp_path)
    plan, recorded = planned(executor, 1), executor._runner.recorded
    assert recorded is not None
    assert recorded.takes(plan)
    torch.set_num_threads(2)
    try:
        assert not recorded.takes(plan)
    finally:
        torch.set_num_threads(1)


@torch.inference_mode()
def test_no_more_tokens_than_one_product_in_c_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family("llama", tmp_path)
    executor = make_executor(tmp_path)
    model = executor._runner.model
    down = model.linears()[3]
    (first,) = down._products
    down.use([6], [first, OtherProduct()])
    recorded = record_layers(model, executor._runner.kv_cache, executor._runner.plan_attention)
    assert recorded is not None
    assert [recorded.takes(planned(executor, count)) for count in (6, 7)] == [True, False]
    down.use([], [OtherProduct()])
    assert record_layers(model, executor._runner.kv_cache, executor._runner.plan_attention) is None


class OtherProduct:
    """Is never asked."""

    is_noted = False

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        raise NotImplementedError

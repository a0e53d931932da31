"""Linear layers in 8-bit numbers: within the error of what they are rounded to, chosen by time, refused where there are
none."""

import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import ExecutorConfig
from neaptide.executors.registry import UnknownExecutorError, check_executor
from neaptide.executors.torch.layers import products, quantized
from neaptide.executors.torch.layers.linear import Linear, choose_products
from neaptide.executors.torch.layers.products import QUANTIZED, choose
from neaptide.executors.torch.layers.quantized import quantize_weight, quantized_product, quantizes
from neaptide.kernels.native import COMPILERS, CompileError
from neaptide.kernels.row_quantization import ByteProduct
from tests.executors.driver import EVERY_LOGPROB, Driver, assert_logprobs, make_executor, random_prompt, write_family
from tests.kernels.quantized_rows import quantize_rows

CPU = torch.device("cpu")
HAS_PRODUCT = any(map(shutil.which, COMPILERS)) and ByteProduct.takes(torch.float32, 64)
needs_product = pytest.mark.skipif(not HAS_PRODUCT, reason="nothing multiplies 8-bit numbers here")
CASES = [(torch.float32, 1e-5), (torch.bfloat16, 2**-8 * 1.01)]


def dequantized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product of what both are rounded to, in float64."""
    numbers, scales, zeros = quantize_rows(x)
    rows = (numbers - zeros.unsqueeze(1)).double() * scales.double().unsqueeze(1)
    whole, each = quantize_weight(weight)
    return rows @ (whole.double() * each.double().unsqueeze(1)).t() + bias.double()


def tensors(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a weight [70, 96] whose outputs are of very different sizes, a bias."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(70, 96, generator=generator) * torch.logspace(-3, 1, 70).unsqueeze(1)
    x = torch.randn(rows, 96, generator=generator) * torch.logspace(-2, 2, rows).unsqueeze(1)
    return x.to(dtype), weight.to(dtype), torch.randn(70, generator=generator).to(dtype)


def layer(dtype: torch.dtype = torch.float32, outputs: int = 70, inputs: int = 96) -> Linear:
    made = Linear(outputs, inputs, bias=False, dtype=dtype, device=CPU)
    assert made.weight is not None
    made.weight.normal_(generator=torch.Generator().manual_seed(0))
    return made


@needs_product
@pytest.mark.parametrize(("dtype", "places"), CASES)
@pytest.mark.parametrize("rows", [1, 2, 17, 65, 515])
def test_it_is_the_product_of_what_is_rounded(rows: int, dtype: torch.dtype, places: float) -> None:
    x, weight, bias = tensors(rows, dtype)
    product = quantized_product(weight, bias)
    expected = dequantized(x, weight, bias)
    slack = 1.01 * places * expected.abs() + 1e-5 * expected.abs().amax(dim=1, keepdim=True)
    assert ((product(x).double() - expected).abs() <= slack).all()
    sums = torch.ones(rows, 70, dtype=dtype)
    product.add_to(sums, x)
    assert ((sums.double() - 1 - expected).abs() <= slack + places).all()
    error = (product(x).double() - (x.double() @ weight.double().t() + bias.double())).norm()
    assert error < 0.015 * expected.norm()


@needs_product
def test_a_recording_may_note_all_rows() -> None:
    made = layer()
    made.use([], [quantized_product(torch.ones(4, 96), None)])
    assert made.most_rows_in_c() == sys.maxsize


def test_it_computes_all_rows_of_a_layer_or_none() -> None:
    fast = {1: {"a": 1.0, QUANTIZED: 1.9}, 16: {"a": 2.0, QUANTIZED: 2.0}, 256: {"a": 9.0, QUANTIZED: 8.0}}
    assert choose(fast) == {1: QUANTIZED}
    slow = {1: {"a": 1.0, "b": 3.0, QUANTIZED: 1.0}, 16: {"a": 9.0, "b": 2.0, QUANTIZED: 2.1}}
    assert choose(slow) == {1: "a", 16: "b"}


@needs_product
def test_all_but_the_logits_and_small_weights_may_be_quantized(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[str]] = []

    def rows_by_kind(samples: Any, kinds: dict[str, Any], *_: Any, **__: Any) -> dict[int, str]:
        seen.append(list(kinds))
        return {1: list(kinds)[-1]}

    monkeypatch.setattr("neaptide.executors.torch.layers.linear.rows_by_kind", rows_by_kind)
    monkeypatch.setattr(products, "UNMEASURED_BYTES", 70 * 96 * 4)
    layers, small, logits = [layer(), layer()], layer(outputs=69), layer()
    with caplog.at_level(logging.WARNING):
        choose_products([*layers, small, logits], "auto", MonotonicClock(), may_quantize=True)
    assert [QUANTIZED in kinds for kinds in seen] == [True, False]
    assert [each.weight is None for each in layers] == [True, True]
    assert not caplog.messages
    monkeypatch.setattr(products, "UNMEASURED_BYTES", 1 << 30)
    choose_products([layer(), layer()], "auto", MonotonicClock(), may_quantize=True)
    assert caplog.messages == ["no layer is quantized: 8-bit products are not faster here, or the layers are too small"]


@needs_product
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "opt", "granite", "gpt2", "olmo2"])
def test_whole_models_are_close(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes and biases on layers that are all quantized, though they are small."""
    monkeypatch.setattr(products, "UNMEASURED_BYTES", 1)
    monkeypatch.setattr(products, "choose", lambda seconds, **_: {1: list(next(iter(seconds.values())))[-1]})
    model = write_family(family, tmp_path, spread=0.1)
    executor = make_executor(tmp_path, quantization="w8a8")
    assert executor.build.endswith("w8a8")
    driver = Driver(executor)
    for index, length in enumerate((3, 21, 50)):
        driver.add(f"r{index}", random_prompt(length, index), EVERY_LOGPROB)
    driver.run(4, chunk=20)
    assert_logprobs(model, driver, tolerance=0.1)
    with pytest.raises(AssertionError):
        assert_logprobs(model, driver, tolerance=1e-4)


@pytest.mark.parametrize(
    ("changes", "dtype", "device", "words"),
    [
        ({"quantization": "w4"}, torch.float32, "cpu", "'w4' is not supported: none, w8a8"),
        ({}, torch.float32, "meta", "'w8a8' needs a CPU, not device 'meta'"),
        ({"batch_invariant": True}, torch.float32, "cpu", "'w8a8' cannot be combined with batch_invariant"),
        ({"cpu_kernels": "torch"}, torch.float32, "cpu", "'w8a8' needs C kernels, not cpu_kernels = 'torch'"),
        ({}, torch.float16, "cpu", "'w8a8' needs dtype float32 or bfloat16, not float16"),
    ],
)
def test_what_it_does_without_is_refused_in_one_line(
    changes: dict[str, Any], dtype: torch.dtype, device: str, words: str
) -> None:
    config = ExecutorConfig(**({"quantization": "w8a8"} | changes))
    with pytest.raises(ValueError, match=f"^quantization {words}") as caught:
        quantizes(config, dtype, torch.device(device))
    assert "\n" not in str(caught.value)


def test_other_executors_have_none() -> None:
    check_executor("torch", quantization="w8a8")
    with pytest.raises(UnknownExecutorError, match="executor = 'vllm' does not support quantization = 'w8a8'"):
        check_executor("vllm", quantization="w8a8")


def test_a_processor_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteProduct, "takes", lambda *_: False)
    with pytest.raises(ValueError, match="'w8a8' is not available: this CPU has neither AVX2 nor AVX512_VNNI"):
        quantizes(ExecutorConfig(quantization="w8a8"), torch.float32, CPU)


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(*_: object) -> bool:
        raise CompileError("there is no C compiler")

    monkeypatch.setattr(ByteProduct, "takes", takes)
    with pytest.raises(ValueError, match="'w8a8' is not available: there is no C compiler"):
        quantizes(ExecutorConfig(quantization="w8a8"), torch.float32, CPU)


@needs_product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_processor_with_them_passes_the_trial(dtype: torch.dtype) -> None:
    assert quantizes(ExecutorConfig(quantization="w8a8"), dtype, CPU)


@needs_product
def test_products_that_overflow_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "quantized_product", lambda *_: lambda x: x[:, :16] * 32.4)
    with pytest.raises(ValueError, match="'w8a8' is not available: 8-bit products overflow here"):
        quantizes(ExecutorConfig(quantization="w8a8"), torch.float32, CPU)


def test_none_is_asked_for_by_default() -> None:
    assert not quantizes(ExecutorConfig(), torch.float32, CPU)

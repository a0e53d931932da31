"""Linear layers in 8-bit numbers: within the error of what they are rounded to, chosen by time, refused where there are
none."""

import logging
import sys
from collections.abc import Callable
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
from neaptide.executors.torch.layers.products import QUANTIZED, Product, choose
from neaptide.executors.torch.layers.quantized import (
    QuantizedProduct,
    overflows,
    quantize_weight,
    quantized_product,
    quantizer_of,
)
from neaptide.kernels.row_quantization import ByteProduct, NativeRowQuantizer, RowQuantizer, row_quantizer
from tests.executors.driver import EVERY_LOGPROB, Driver, assert_logprobs, make_executor, random_prompt, write_family

CPU = torch.device("cpu")
OVERFLOW = "this CPU's 8-bit products overflow"
MakeQuantized = Callable[[Tensor, Tensor | None, RowQuantizer], Product]
CASES = [(torch.float32, 1e-5), (torch.bfloat16, 2**-8 * 1.01)]


def dequantized(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of what both are rounded to, in float64."""
    numbers, scales, zeros = RowQuantizer().quantize(x, x.shape[0])
    rows = (numbers.double() - zeros.double().unsqueeze(1)) * scales.double().unsqueeze(1)
    whole, each = quantize_weight(weight)
    product: Tensor = rows @ (whole.double() * each.double().unsqueeze(1)).t()
    return product if bias is None else product + bias.double()


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


@pytest.mark.parametrize("make", [QuantizedProduct, quantized_product])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(("dtype", "places"), CASES)
@pytest.mark.parametrize("rows", [1, 2, 17, 65, 512, 515])
def test_it_is_the_product_of_what_is_rounded(
    rows: int, dtype: torch.dtype, places: float, kernels: str, make: MakeQuantized
) -> None:
    if overflows(make, row_quantizer(kernels)):
        pytest.skip(OVERFLOW)
    x, weight, bias = tensors(rows, dtype)
    product = make(weight, bias, row_quantizer(kernels))
    expected = dequantized(x, weight, bias)
    # A number half way between two may be rounded to either: a step of one input.
    slack = 1.01 * places * expected.abs() + 1e-4 * expected.abs().amax(dim=1, keepdim=True)
    assert ((product(x).double() - expected).abs() <= slack).double().mean() > 0.99
    sums = torch.ones(rows, 70, dtype=dtype)
    product.add_to(sums, x)
    assert ((sums.double() - 1 - expected).abs() <= slack + places).double().mean() > 0.99
    error = (product(x).double() - (x.double() @ weight.double().t() + bias.double())).norm()
    assert error < 0.015 * expected.norm()


@pytest.mark.parametrize("make", [QuantizedProduct, quantized_product])
def test_a_row_depends_on_no_other_and_a_bad_one_stays_alone(make: MakeQuantized) -> None:
    x, weight, bias = tensors(515, torch.bfloat16)
    product = make(weight, bias, row_quantizer())
    whole = product(x)
    for rows in (1, 2, 65, 100):
        assert torch.equal(product(x[:rows]), whole[:rows])
    x[3, 5] = float("nan")
    found = product(x)
    assert found[3].isnan().all()
    assert torch.equal(found[4:], whole[4:])


def test_products_in_c_take_all_that_they_can() -> None:
    """And a recording notes them."""
    quantizer, made = row_quantizer(), layer()
    in_c = isinstance(quantizer, NativeRowQuantizer) and ByteProduct.takes(torch.float32, 96)
    weight = torch.ones(4, 96)
    chosen = quantized_product(weight, None, quantizer)
    assert isinstance(chosen, ByteProduct if in_c else QuantizedProduct)
    others = [quantized_product(weight, None, RowQuantizer()), quantized_product(weight.half(), None, quantizer)]
    assert [type(product) for product in others] == [QuantizedProduct, QuantizedProduct]
    made.use([], [chosen])
    assert made.most_rows_in_c() == (sys.maxsize if in_c else 0)
    made.use([], others[:1])
    assert made.most_rows_in_c() == 0


def test_it_computes_all_rows_of_a_layer_or_none() -> None:
    fast = {1: {"a": 1.0, QUANTIZED: 1.9}, 16: {"a": 2.0, QUANTIZED: 2.0}, 256: {"a": 9.0, QUANTIZED: 8.0}}
    assert choose(fast) == {1: QUANTIZED}
    slow = {1: {"a": 1.0, "b": 3.0, QUANTIZED: 1.0}, 16: {"a": 9.0, "b": 2.0, QUANTIZED: 2.1}}
    assert choose(slow) == {1: "a", 16: "b"}


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
        choose_products([*layers, small, logits], "auto", MonotonicClock(), row_quantizer())
    assert [QUANTIZED in kinds for kinds in seen] == [True, False]
    assert [each.weight is None for each in layers] == [True, True]
    assert not caplog.messages
    monkeypatch.setattr(products, "UNMEASURED_BYTES", 1 << 30)
    choose_products([layer(), layer()], "auto", MonotonicClock(), row_quantizer())
    assert caplog.messages == ["no layer is quantized: 8-bit products are not faster here, or the layers are too small"]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "opt", "granite", "gpt2", "olmo2"])
def test_whole_models_are_close(family: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes and biases on layers that are all quantized, though they are small. Or one line that says no."""
    monkeypatch.setattr(products, "UNMEASURED_BYTES", 1)
    monkeypatch.setattr(products, "choose", lambda seconds, **_: {1: list(next(iter(seconds.values())))[-1]})
    model = write_family(family, tmp_path, spread=0.1)
    if overflows(quantized_product, row_quantizer(kernels)):
        with pytest.raises(ValueError, match=f"'w8a8' is not available: {OVERFLOW}"):
            make_executor(tmp_path, cpu_kernels=kernels, quantization="w8a8")
        return
    executor = make_executor(tmp_path, cpu_kernels=kernels, quantization="w8a8")
    assert executor.build.endswith("w8a8")
    driver = Driver(executor)
    for index, length in enumerate((3, 21, 50)):
        driver.add(f"r{index}", random_prompt(length, index), EVERY_LOGPROB)
    driver.run(4, chunk=20)
    assert_logprobs(model, driver, tolerance=0.1)
    with pytest.raises(AssertionError):
        assert_logprobs(model, driver, tolerance=1e-4)


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"quantization": "w4"}, "cpu", "quantization 'w4' is not supported: none, w8a8"),
        ({}, "meta", "quantization 'w8a8' needs a CPU, not device 'meta'"),
        ({"batch_invariant": True}, "cpu", "quantization 'w8a8' cannot be combined with batch_invariant"),
    ],
)
def test_what_it_does_without_is_refused_in_one_line(changes: dict[str, Any], device: str, words: str) -> None:
    config = ExecutorConfig(**({"quantization": "w8a8"} | changes))
    with pytest.raises(ValueError, match=words) as caught:
        quantizer_of(config, torch.device(device))
    assert "\n" not in str(caught.value)


def test_other_executors_have_none() -> None:
    check_executor("torch", quantization="w8a8")
    with pytest.raises(UnknownExecutorError, match="executor = 'vllm' does not support quantization = 'w8a8'"):
        check_executor("vllm", quantization="w8a8")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            lambda *_: (_ for _ in ()).throw(RuntimeError("no such operator\nmore")),
            "is not available: no such operator",
        ),
        (lambda *_: lambda x: x[:, :16] * 32.4, OVERFLOW),
    ],
)
def test_products_that_are_not_there_or_overflow_stop_the_start(
    broken: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "quantized_product", broken)
    with pytest.raises(ValueError, match=words) as caught:
        quantizer_of(ExecutorConfig(quantization="w8a8"), CPU)
    assert "\n" not in str(caught.value)


def test_none_is_asked_for_by_default() -> None:
    assert quantizer_of(ExecutorConfig(), CPU) is None

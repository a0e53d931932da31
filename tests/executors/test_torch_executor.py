"""The executor around the model: isolation, log-probabilities, seeds, sizes, devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, ExecutorConfig
from neaptide.engine.interfaces import Executor
from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import StepPlan
from neaptide.executors.torch import device, torch_executor
from neaptide.executors.torch.layers import products
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.kernels import native
from tests.executors.driver import (
    GAPS,
    VOCAB,
    Driver,
    assert_greedy,
    make_executor,
    random_prompt,
    reference_logits,
    write_bfloat16_checkpoint,
)

Gqa = tuple[Path, LlamaForCausalLM]


def test_non_finite_logits_end_one_request(gqa: Gqa) -> None:
    """A request whose embedding row is NaN fails; the others' text is what it is without it."""
    executor = make_executor(gqa[0])
    clean, mixed = Driver(executor), Driver(executor, seed=1)
    for driver, prefix in ((clean, "c"), (mixed, "m")):
        for index in range(3):
            params = SamplingParams(seed=index, temperature=0.5 * index, logprobs=1, prompt_logprobs=1)
            driver.add(f"{prefix}{index}", random_prompt(20 + index, index), params)
    with torch.inference_mode():
        executor._runner.model.embedding[0] = float("nan")
    bad = mixed.add("bad", [5, 6, 0, 7], SamplingParams(temperature=1.0, logprobs=1, prompt_logprobs=1))
    clean.run(6)
    mixed.run(6)
    assert bad.error == "numerical_error"
    assert bad.output == []
    assert not bad.logprobs
    assert not bad.prompt_logprobs
    for index in range(3):
        assert mixed.tracks[f"m{index}"].error is None
        assert mixed.tracks[f"m{index}"].output == clean.tracks[f"c{index}"].output
    # Blocks that hold the failed request's NaN go to another one.
    mixed.finish("bad")
    mixed.free.append(mixed.free.pop(0))
    after = mixed.add("m0-again", mixed.tracks["m0"].prompt, SamplingParams(temperature=0.0))
    mixed.run(6)
    assert after.output == mixed.tracks["m0"].output[:6]


def test_unknown_token_ids_end_one_request(gqa: Gqa) -> None:
    driver = Driver(make_executor(gqa[0]))
    driver.add("bad", [5, VOCAB, 6])
    driver.add("worse", [-1])
    good = driver.add("good", random_prompt(10, 1))
    driver.run(3)
    assert driver.tracks["bad"].error == driver.tracks["worse"].error == "invalid_token"
    assert len(good.output) == 3


def test_logprobs_are_raw_and_as_many_as_asked(gqa: Gqa) -> None:
    """Penalties, bias and temperature change the choice, not the reported distribution."""
    driver = Driver(make_executor(gqa[0]))
    prompt = random_prompt(12, 1)
    bent = driver.add("bent", prompt, SamplingParams(seed=1, temperature=3.0, logit_bias={9: 50.0}, logprobs=2))
    chosen_only = driver.add("chosen", prompt, SamplingParams(temperature=0.0, logprobs=0))
    silent = driver.add("silent", prompt, SamplingParams(temperature=0.0))
    driver.run(1)
    expected = torch.log_softmax(reference_logits(gqa[1], prompt)[-1], dim=-1)
    best = expected.topk(2)
    assert bent.logprobs[0].token_id == bent.output[0] == 9
    assert bent.logprobs[0].logprob == pytest.approx(float(expected[9]), abs=1e-4)
    assert bent.logprobs[0].top_ids == best.indices.tolist()
    assert bent.logprobs[0].top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)
    assert (chosen_only.logprobs[0].token_id, chosen_only.logprobs[0].top_ids) == (chosen_only.output[0], [])
    assert silent.logprobs == []


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_prompt_logprobs_cover_the_prompt_once(chunk: int, gqa: Gqa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_executor, "_PROMPT_SCORE_ROWS", 5)
    driver = Driver(make_executor(gqa[0]))
    track = driver.add("a", random_prompt(23, 2), SamplingParams(temperature=0.0, prompt_logprobs=3))
    driver.add("b", random_prompt(9, 3))
    driver.run(3, chunk=chunk)
    expected = torch.log_softmax(reference_logits(gqa[1], track.prompt), dim=-1)
    assert [record.token_id for record in track.prompt_logprobs] == track.prompt[1:]
    for position, record in enumerate(track.prompt_logprobs):
        best = expected[position].topk(3)
        assert record.top_ids == best.indices.tolist()
        assert record.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)
        assert record.logprob == pytest.approx(float(expected[position, record.token_id]), abs=1e-4)


def test_seeded_text_does_not_depend_on_company(gqa: Gqa) -> None:
    executor = make_executor(gqa[0])
    params = SamplingParams(seed=5, temperature=0.8, top_p=0.9)
    alone, crowd = Driver(executor), Driver(executor, seed=1)
    one = alone.add("one", random_prompt(15, 1), params)
    alone.run(10)
    for index in range(5):
        crowd.add(f"other{index}", random_prompt(10 + index, index), SamplingParams(temperature=1.0))
    crowd.step({f"other{index}": 3 for index in range(5)})
    two = crowd.add("two", random_prompt(15, 1), params)
    crowd.run(10, chunk=6)
    assert two.output == one.output
    assert len({tuple(track.output) for track in crowd.tracks.values()}) == 6


def test_unseeded_requests_repeat_with_the_engine_seed(gqa: Gqa) -> None:
    outputs = []
    for seed in (0, 0, 1):
        driver = Driver(make_executor(gqa[0], seed=seed))
        track = driver.add("r", random_prompt(15, 1), SamplingParams(temperature=1.5))
        driver.run(12)
        outputs.append(track.output)
    assert outputs[0] == outputs[1] != outputs[2]


def test_state_lives_until_the_request_ends(gqa: Gqa) -> None:
    executor = make_executor(gqa[0])
    driver = Driver(executor)
    driver.add("a", [4, 5])
    driver.add("b", [4, 5])
    driver.run(1)
    assert set(executor._states) == {"a", "b"}
    driver.finish("a")
    driver.step({"b": 1})
    assert set(executor._states) == {"b"}
    result = executor.submit(StepPlan.of_parts(9, [], finished_ids=["b"])).wait()
    assert not len(result.token_ids)
    assert not executor._states


def test_step_times_add_up(gqa: Gqa) -> None:
    clock = MonotonicClock()
    driver = Driver(make_executor(gqa[0]))
    driver.add("a", random_prompt(50, 1))
    start_s = clock.now()
    result = driver.step({"a": 50})
    elapsed_s = clock.now() - start_s
    assert min(result.prepare_s, result.model_s, result.sample_s) > 0
    assert result.prepare_s + result.model_s + result.sample_s <= elapsed_s


def test_number_of_blocks_follows_memory(gqa: Gqa) -> None:
    config = ExecutorConfig(model_path=str(gqa[0]), device="cpu", dtype="float32")
    block_bytes = 16 * 2 * 2 * 2 * 8 * 4
    executor = TorchExecutor(config, CacheConfig(kv_cache_bytes=10 * block_bytes + 1), MonotonicClock())
    assert executor.num_blocks == 10
    with pytest.raises(ValueError, match="too small for one block"):
        TorchExecutor(config, CacheConfig(kv_cache_bytes=block_bytes - 1), MonotonicClock())


@pytest.mark.parametrize(
    ("flags", "checkpoint", "dtype"),
    [
        (set(), "bfloat16", torch.float32),
        ({"amx_bf16"}, "bfloat16", torch.bfloat16),
        ({"avx512_bf16"}, "bfloat16", torch.bfloat16),
        ({"avx512_bf16"}, "float16", torch.float32),
        (set(), "float32", torch.float32),
    ],
)
def test_auto_dtype_on_a_cpu(
    flags: set[str], checkpoint: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cpu_flags", lambda: flags)
    assert device.pick_dtype("auto", checkpoint, torch.device("cpu")) == dtype


@pytest.mark.parametrize(("flags", "dtype"), [({"avx512_bf16"}, "bfloat16"), (set(), "float32")])
def test_auto_runs_a_bfloat16_checkpoint_in_what_the_cpu_computes(
    flags: set[str], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cpu_flags", lambda: flags)
    model = write_bfloat16_checkpoint(tmp_path)
    executor = make_executor(tmp_path, dtype="auto")
    assert executor.dtype_name == dtype
    driver = Driver(executor)
    for index in range(6):
        driver.add(f"r{index}", random_prompt(10 + 5 * index, index))
    driver.run(8)
    assert sum(assert_greedy(model, track, GAPS[dtype]) for track in driver.tracks.values()) >= 24


def test_unknown_device_and_dtype() -> None:
    with pytest.raises(ValueError, match="dtype 'int8'"):
        device.pick_dtype("int8", "float32", torch.device("cpu"))
    with pytest.raises(ValueError, match="device 'meta'"):
        device.pick_device("meta")
    assert device.pick_dtype("float16", "float32", torch.device("cpu")) == torch.float16
    assert device.cpu_flags()


def test_blocks_come_back_from_host_memory_byte_for_byte(gqa: Gqa) -> None:
    executor = make_executor(gqa[0], num_blocks=8, num_host_blocks=4)
    cache = executor._runner.kv_cache
    with torch.inference_mode():
        for layer in cache:
            layer.copy_(torch.randn_like(layer))
    before = [layer[[3, 6]].clone() for layer in cache]
    step = StepPlan.of_parts(1, [])
    step.saves = [(3, 2), (6, 0)]
    executor.submit(step).wait()
    with torch.inference_mode():
        for layer in cache:
            layer.zero_()
    step = StepPlan.of_parts(2, [])
    step.loads = [(2, 5), (0, 1)]
    executor.submit(step).wait()
    for layer, saved in zip(cache, before, strict=True):
        assert torch.equal(layer[[5, 1]], saved)
        assert not layer[[0, 2, 3, 4, 6, 7]].any()


def test_a_step_saves_a_block_before_it_loads_another_into_it(gqa: Gqa) -> None:
    executor = make_executor(gqa[0], num_blocks=4, num_host_blocks=2)
    cache = executor._runner.kv_cache
    with torch.inference_mode():
        for layer in cache:
            layer[1], layer[2] = 1.0, 2.0
    step = StepPlan.of_parts(1, [])
    step.saves = [(1, 0)]
    executor.submit(step).wait()
    step = StepPlan.of_parts(2, [])
    step.saves, step.loads = [(2, 1)], [(0, 2)]
    executor.submit(step).wait()
    step = StepPlan.of_parts(3, [])
    step.loads = [(1, 3)]
    executor.submit(step).wait()
    for layer in cache:
        assert (layer[2] == 1.0).all()
        assert (layer[3] == 2.0).all()


def test_host_memory_holds_as_many_blocks_as_fit(gqa: Gqa) -> None:
    config = ExecutorConfig(model_path=str(gqa[0]), device="cpu", dtype="float32", num_threads=1)
    block_bytes = 16 * make_executor(gqa[0]).kv_bytes_per_token
    cache = CacheConfig(num_blocks=4, host_cache_bytes=3 * block_bytes + 1)
    assert TorchExecutor(config, cache, MonotonicClock()).num_host_blocks == 3


def test_a_context_that_no_gpu_memory_holds_is_refused_before_anything_is_built(
    gqa: Gqa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_executor, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch_executor, "pick_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(torch_executor, "free_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(TorchExecutor, "_load", lambda *_: pytest.fail("built"))
    config = ExecutorConfig(model_path=str(gqa[0]), max_model_len=8192)
    with pytest.raises(ValueError, match=r"^the KV cache holds \d+ tokens, fewer than one request of max_model_len"):
        TorchExecutor(config, CacheConfig(), MonotonicClock())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_missing_cuda_is_said() -> None:
    assert device.pick_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="no CUDA device"):
        device.pick_device("cuda")


def test_close_drops_weights_and_cache(gqa: Gqa) -> None:
    executor = make_executor(gqa[0])
    behind_the_seam: Executor = executor
    behind_the_seam.close()
    executor.close()
    assert not hasattr(executor, "_runner")


def test_a_build_says_what_computes_and_not_what_might(
    gqa: Gqa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile that was measured on torch is none of the kernels in C."""

    def fail(compiler: str, source: Path, path: Path) -> None:
        raise native.CompileError("cc fails: no space left on device")

    monkeypatch.setattr(native, "_compile", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load_library.cache_clear()
    assert make_executor(gqa[0]).build == ""


def test_a_kv_cache_that_does_not_fit_is_told_with_what_does(gqa: Gqa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_executor, "free_bytes", lambda device: (3 << 30) - 1)
    config, cache = ExecutorConfig(model_path=str(gqa[0]), device="cpu"), CacheConfig(kv_cache_bytes=9999 << 30)
    with pytest.raises(ValueError, match="does not fit") as refused:
        TorchExecutor(config, cache, MonotonicClock())
    assert str(refused.value) == (
        "a KV cache of 9999 GiB does not fit: cpu has 2.9 GiB free after the weights; lower kv_cache_gib"
    )


def test_the_system_tells_how_much_memory_is_free() -> None:
    free = device.free_bytes(torch.device("cpu"))
    assert free is not None
    assert free > 1 << 20


class RowsOfProducts(TorchDispatchMode):
    """The numbers of rows that torch's products get."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_linear_pointwise", "linear", "mm", "addmm"):
            self.seen.add(args[name == "addmm"].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
def test_steps_of_any_size_make_products_of_few(tmp_path: Path, cpu_kernels: str) -> None:
    """oneDNN keeps memory for each number of rows: engines would grow with steps. Where it is ours bf16 has no such."""
    write_bfloat16_checkpoint(tmp_path, max_position_embeddings=1024)
    driver = Driver(make_executor(tmp_path, dtype="bfloat16", num_blocks=64, cpu_kernels=cpu_kernels))
    steps = [1, 2, 3, 5, 7, 9, 15, 17, 25, 33, 40, 49, 65, 97, 129, 193, 255, 257, 300, 511, 513, 700]
    with RowsOfProducts() as rows:
        for number, tokens in enumerate(steps):
            driver.add(str(number), random_prompt(tokens, number))
            driver.step({str(number): tokens})
            driver.finish(str(number))
    few = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512}
    assert rows.seen == (set() if cpu_kernels == "auto" and products._multiplies_pairs() else few)

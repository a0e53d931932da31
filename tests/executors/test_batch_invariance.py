"""``batch_invariant``: a request's bits are those that it has alone, whatever happens beside it or to it."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neaptide.engine.clock import MonotonicClock
from neaptide.engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from neaptide.engine.messages import TokenLogprobs
from neaptide.engine.params import SamplingParams, Tier
from neaptide.executors.torch import batch_invariance
from neaptide.executors.torch.layers.norm import LayerNorm
from neaptide.executors.torch.sampling.logprobs import score
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.kernels import native
from neaptide.kernels.linear import PackedLinear
from tests.executors.driver import VOCAB, Driver, Track, make_executor, random_prompt, write_family
from tests.executors.engine_run import EngineRun

pytestmark = pytest.mark.skipif(not any(map(shutil.which, native.COMPILERS)), reason="there is no C compiler")

BLOCK = 16
NUM_OUTPUT = 6
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 20, "num_key_value_heads": 1},
    "opt": {"hidden_size": 60},
    "gpt_neox": {},
}
Records = list[TokenLogprobs]


@pytest.fixture(scope="module", params=FAMILIES)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchExecutor:
    directory = tmp_path_factory.mktemp(request.param)
    write_family(request.param, directory, **FAMILIES[request.param])
    return make_executor(directory, num_blocks=120, batch_invariant=True)


class Company:
    """One request among others that come, are cut, sit out and share its prefix, as a seed says."""

    def __init__(self, executor: TorchExecutor, seed: int) -> None:
        self.rng = random.Random(seed)
        self.driver = Driver(executor, seed=seed)
        self.prompt = [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(1, 150))]
        warm = self.rng.random() < 0.5
        self.params = SamplingParams(
            seed=seed, temperature=0.9 if warm else 0.0, top_p=0.8 if warm else 1.0, logprobs=VOCAB, prompt_logprobs=2
        )

    def alone(self) -> Track:
        driver = Driver(self.driver.executor)
        track = driver.add("alone", self.prompt, self.params)
        driver.run(NUM_OUTPUT)
        end_all(driver)
        return track

    def together(self) -> Track:
        rng, driver = self.rng, self.driver
        for index in range(rng.randrange(0, 5)):
            params = SamplingParams(temperature=rng.choice((0.0, 1.3)), seed=index, logprobs=rng.choice((None, 3)))
            driver.add(f"other{index}", random_prompt(rng.randrange(1, 80), rng.randrange(10**6)), params)
        shared: list[int] = []
        full_blocks = (len(self.prompt) - 1) // BLOCK
        if full_blocks and rng.random() < 0.6:
            owner = driver.add("owner", self.prompt[: full_blocks * BLOCK] + random_prompt(rng.randrange(1, 9), 1))
            while owner.computed < full_blocks * BLOCK:
                self.step()
            shared = owner.blocks[: rng.randrange(1, full_blocks + 1)]
        track = driver.add("it", self.prompt, self.params, shared=shared)
        preemptions = rng.randrange(3)
        while len(track.output) < NUM_OUTPUT:
            if preemptions and rng.random() < 0.3:
                preemptions -= 1
                track.blocks, track.computed, track.shared_tokens = [], 0, 0
                track.prompt_logprobs = []  # they come by again
            self.step()
        end_all(driver)
        return track

    def step(self) -> None:
        """Some of the requests, in any order, each with some of what it has left to compute."""
        counts: dict[str, int] = {}
        names = list(self.driver.tracks)
        self.rng.shuffle(names)
        for name in names:
            track = self.driver.tracks[name]
            left = len(track.tokens) - track.computed
            if left and len(track.output) < 30 and self.rng.random() < 0.7:
                counts[name] = left if self.rng.random() < 0.4 else self.rng.randrange(1, left + 1)
        if counts:
            self.driver.step(counts)


def end_all(driver: Driver) -> None:
    for name in list(driver.tracks):
        driver.finish(name)
    driver.submit({})
    driver.wait()


def assert_same(found: Track, alone: Track) -> None:
    assert found.error is None
    assert found.output == alone.output
    assert found.logprobs == alone.logprobs
    assert found.prompt_logprobs == alone.prompt_logprobs[found.shared_tokens :]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_alone_and_in_any_company(executor: TorchExecutor, seed: int) -> None:
    company = Company(executor, seed)
    assert_same(company.together(), company.alone())


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_alone_and_in_any_company_at_length(executor: TorchExecutor, seed: int) -> None:
    company = Company(executor, seed)
    assert_same(company.together(), company.alone())


def test_readers_of_one_prefix_in_one_step(executor: TorchExecutor) -> None:
    params = SamplingParams(temperature=0.0, logprobs=VOCAB, prompt_logprobs=0)
    prompts = [random_prompt(100, 1) + random_prompt(1 + index, 2 + index) for index in range(3)]
    tracks = []
    for index, prompt in enumerate(prompts):
        driver = Driver(executor)
        tracks.append(driver.add(f"alone{index}", prompt, params))
        driver.run(NUM_OUTPUT)
        end_all(driver)
    driver = Driver(executor)
    driver.add("0", prompts[0], params)
    driver.run(1)
    shared = driver.tracks["0"].blocks[:6]
    for index in (1, 2):
        driver.add(str(index), prompts[index], params, shared=shared)
    driver.run(NUM_OUTPUT)
    together = list(driver.tracks.values())
    end_all(driver)
    for found, alone in zip(together, tracks, strict=True):
        assert_same(found, alone)


def test_through_an_engine_with_hits_and_preemption(executor: TorchExecutor) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=40, max_num_seqs=8, max_model_len=160, offline_max_kv_ratio=1.0)
    config = EngineConfig(cache=CacheConfig(block_size=BLOCK), scheduler=scheduler)
    prefix = random_prompt(50, 0)
    prompts = {f"r{i}": [*(prefix if i % 2 else []), *random_prompt(3 + 7 * i, i + 1)] for i in range(8)}
    together = EngineRun(config, executor)
    for index, (name, prompt) in enumerate(prompts.items()):
        together.add(name, prompt, Tier.FLEX if index % 3 else Tier.DEFAULT, logprobs=5)
        together.step()
    running = together.core.scheduler.queues.running_offline
    while together.core.has_work:
        together.step()
        if len(running) > 1 and len(together.ends) < 4:
            together.preempt(next(iter(running.values())))
    assert sum(end.num_preemptions for end in together.ends.values()) > 3
    assert sum(end.num_cached_tokens > 0 for end in together.ends.values()) > 2
    for name, prompt in prompts.items():
        alone = EngineRun(config, executor)
        alone.add(name, prompt, logprobs=5)
        alone.finish()
        assert together.tokens[name] == alone.tokens[name]
        assert together.logprobs[name] == alone.logprobs[name]


@pytest.mark.parametrize("rows", [1, 2, 63, 300])
def test_torch_scores_and_norms_a_row_as_if_it_were_alone(rows: int, two_threads: None) -> None:
    """What of a step is left to torch, at sizes that it shares out among its threads."""
    logits, tokens = torch.randn(rows, 8192) * 5, torch.randint(0, 8192, (rows,))
    together = score(logits, tokens, 3)
    norm = LayerNorm(770, 1e-5, dtype=torch.float32, device=torch.device("cpu"))
    norm.weight.normal_()
    norm.bias.normal_()
    x = torch.randn(rows, 770)
    normed = norm(x)
    for row in range(rows):
        one = slice(row, row + 1)
        assert torch.equal(norm(x[one].clone()), normed[one])
        alone = score(logits[one].clone(), tokens[one], 3)
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "bfloat16"}, "batch_invariant computes in float32, not in 'bfloat16'"),
        ({"cpu_kernels": "torch"}, "batch_invariant needs the C kernels: cpu_kernels must be"),
    ],
)
def test_what_it_does_without_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_family("llama", tmp_path)
    with pytest.raises(ValueError, match=words):
        make_executor(tmp_path, batch_invariant=True, **changes)


def test_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_invariant needs a CPU, not device 'cuda'"):
        batch_invariance.pick_invariant_dtype(ExecutorConfig(batch_invariant=True), torch.device("cuda"))


def test_a_bf16_checkpoint_runs_in_float32(tmp_path: Path) -> None:
    write_family("llama", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    executor = make_executor(tmp_path, dtype="auto", batch_invariant=True)
    assert (executor.dtype_name, executor.build) == ("float32", "C kernels, batch-invariant")


def test_without_a_compiler_it_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family("llama", tmp_path)
    monkeypatch.setattr(native, "COMPILERS", ())
    native.load_library.cache_clear()
    with pytest.raises(ValueError, match="batch_invariant needs the C kernels: there is no C compiler"):
        make_executor(tmp_path, batch_invariant=True)


def test_products_that_depend_on_the_rows_stop_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family("llama", tmp_path)
    compute: Callable[[PackedLinear, torch.Tensor], torch.Tensor] = PackedLinear.__call__

    def other_order(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return compute(self, x) if len(x) != 2 else compute(self, x) * (1 + 2e-7)

    monkeypatch.setattr(PackedLinear, "__call__", other_order)
    with pytest.raises(ValueError, match="sums in a different order next to other requests"):
        TorchExecutor(
            ExecutorConfig(model_path=str(tmp_path), device="cpu", num_threads=1, batch_invariant=True),
            CacheConfig(block_size=BLOCK, num_blocks=64),
            MonotonicClock(),
        )

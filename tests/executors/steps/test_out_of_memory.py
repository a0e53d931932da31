"""A step that memory does not hold is computed in pieces; only a request of which no token fits fails."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from neaptide.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from neaptide.engine.messages import StepStats
from neaptide.engine.params import INTERNAL_ERROR, OUT_OF_MEMORY, SamplingParams
from neaptide.engine.steps.plan import ScheduledRequest, StepPlan
from neaptide.executors.torch import in_pieces
from neaptide.executors.torch.in_pieces import Remainder, TokenLimit, is_out_of_memory
from neaptide.executors.torch.input_batch import InputBatch
from neaptide.executors.torch.step_results import TorchHandle
from neaptide.executors.torch.torch_executor import TorchExecutor
from neaptide.kernels import native
from neaptide.launch.serve import embedded_model_path
from tests.executors.driver import Driver, Track, make_executor, random_prompt, write_checkpoint
from tests.executors.engine_run import EngineRun
from tests.executors.grammars.cases import of_schema

Gqa = tuple[Path, LlamaForCausalLM]
FITTING_TOKENS = 40
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "seeded": {"seed": 3, "temperature": 1.2, "top_k": 40, "top_p": 0.9},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "frequency": {"seed": 4, "temperature": 0.9, "frequency_penalty": 1.5, "presence_penalty": 0.7},
    "no output": {"max_tokens": 0, "prompt_logprobs": 0},
}
CUDA_ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB"
NEEDS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, native.COMPILERS)), reason="there is no C compiler")
Forward = Callable[[InputBatch, None], Tensor]


def lack_memory(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, fits: Callable[[InputBatch], bool]
) -> list[int]:
    """From now on the model raises where ``fits`` says no, when its last layer has written. Returns the tokens of every
    piece that it computed, as they come."""
    forward: Forward = executor._runner.hidden_states
    computed: list[int] = []

    def with_little_memory(batch: InputBatch, giving_up: None) -> Tensor:
        hidden = forward(batch, giving_up)
        if not fits(batch):
            raise torch.OutOfMemoryError(CUDA_ERROR)
        computed.append(len(batch.token_ids))
        return hidden

    monkeypatch.setattr(executor._runner, "hidden_states", with_little_memory)
    return computed


def few_tokens(batch: InputBatch) -> bool:
    return len(batch.token_ids) <= FITTING_TOKENS


def run_all(executor: TorchExecutor, depth: int) -> tuple[dict[str, Track], list[int]]:
    """Requests of every kind, and what each step says of memory."""
    driver = Driver(executor, depth=depth)
    ran_out: list[int] = []
    for index, (name, fields) in enumerate(PARAMS.items()):
        driver.add(name, random_prompt(9 + 17 * index, index), SamplingParams(**fields))
    prompts = {name: len(track.prompt) for name, track in driver.tracks.items()}
    ran_out.append(driver.step(prompts).memory_ran_out)
    del driver.tracks["no output"]
    driver.run(8)
    tracks = dict(driver.tracks)
    for name in tracks:
        driver.finish(name)
    driver.step({})
    return tracks, ran_out


# ---- what counts as lack of memory -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA_ERROR),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8589934592 bytes."),
        MemoryError(),
    ],
    ids=["torch", "driver", "cublas", "cpu", "host"],
)
def test_lack_of_memory_has_many_names(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_so_it_is_called_by_torch_on_this_cpu() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 61, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("not enough memory")])
def test_other_errors_are_none_of_it(error: Exception) -> None:
    assert not is_out_of_memory(error)


# ---- steps in pieces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("invariant", [False, pytest.param(True, marks=NEEDS_COMPILER)], ids=["plain", "invariant"])
def test_in_pieces_the_answers_are_those_of_a_step_that_fits(
    gqa: Gqa, monkeypatch: pytest.MonkeyPatch, depth: int, invariant: bool
) -> None:
    roomy, tight = (make_executor(gqa[0], batch_invariant=invariant) for _ in range(2))
    computed = lack_memory(tight, monkeypatch, few_tokens)
    expected, never = run_all(roomy, depth)
    found, ran_out = run_all(tight, depth)
    # 215 tokens do not fit, nor 107, nor 53; 26 do.
    assert (never, ran_out) == ([0], [3])
    assert computed[:9] == [26] * 8 + [7]
    for name, track in found.items():
        assert (track.error, track.output) == (None, expected[name].output), name
        pairs = list(zip(track.logprobs, expected[name].logprobs, strict=True))
        pairs += zip(track.prompt_logprobs, expected[name].prompt_logprobs, strict=True)
        assert len(track.prompt_logprobs) == (len(track.prompt) - 1 if name == "greedy" else 0)
        for got, wanted in pairs:
            assert got == wanted if invariant else got.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_the_next_steps_do_not_run_into_it_again(gqa: Gqa, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(gqa[0])
    computed = lack_memory(executor, monkeypatch, few_tokens)
    driver = Driver(executor)
    driver.add("long", random_prompt(200, 1))
    ran_out = [driver.step({"long": count}).memory_ran_out for count in (40, 60, 100)]
    assert ran_out == [0, 1, 0]
    assert computed == [40, 40, 20, 40, 40, 20]
    assert len(driver.tracks["long"].output) == 1


def test_memory_that_runs_out_behind_the_layers(gqa: Gqa, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that was sampled before the scores of the prompt did not fit is none."""
    executor, roomy = make_executor(gqa[0]), make_executor(gqa[0])
    score, raises = executor._score_prompts, [MemoryError(), None]

    def with_little_memory(*args: Any) -> None:
        score(*args)
        if raises and (error := raises.pop(0)) is not None:
            raise error

    monkeypatch.setattr(executor, "_score_prompts", with_little_memory)
    tracks = []
    for each in (executor, roomy):
        driver = Driver(each)
        tracks.append(driver.add("r", random_prompt(21, 1), SamplingParams(temperature=0.0, prompt_logprobs=0)))
        driver.run(4)
    assert raises == []
    assert tracks[0].output == tracks[1].output
    assert [record.token_id for record in tracks[0].prompt_logprobs] == tracks[0].prompt[1:]


def test_one_line_says_what_to_do(gqa: Gqa, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    executor = make_executor(gqa[0])
    lack_memory(executor, monkeypatch, few_tokens)
    driver = Driver(executor)
    driver.add("long", random_prompt(60, 1))
    with caplog.at_level(logging.WARNING):
        driver.run(1)
    assert caplog.messages == [
        "60 tokens at once do not fit into memory: steps now compute up to 30 tokens at once. If this persists, lower "
        "max_num_batched_tokens or kv_cache_gib"
    ]


def test_another_error_raises_as_ever(gqa: Gqa, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(gqa[0])

    def broken(batch: InputBatch, giving_up: None) -> Tensor:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(executor._runner, "hidden_states", broken)
    driver = Driver(executor)
    driver.add("r", random_prompt(5, 1))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        driver.run(1)


# ---- through the engine ------------------------------------------------------------------------------------------


def serve(executor: TorchExecutor, depth: int, grammar: str = "") -> tuple[EngineRun, list[StepStats]]:
    scheduler = SchedulerConfig(max_model_len=256, overlap_depth=depth)
    run = EngineRun(EngineConfig(cache=CacheConfig(block_size=16), scheduler=scheduler), executor, may_fail=True)
    stats: list[StepStats] = []
    for index in range(5):
        run.add(f"r{index}", random_prompt(30 + 9 * index, index))
    if grammar:
        run.add("constrained", random_prompt(75, 5), grammar=grammar)
    while run.core.has_work:
        outputs = run.core.step()
        stats += outputs.stats
        for output in outputs.outputs:
            run.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                run.ends[output.request_id] = output
        run.core.check_integrity()
    return run, stats


@pytest.mark.parametrize("depth", [0, 1])
def test_no_request_is_taken_for_the_culprit(gqa: Gqa, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    roomy, tight = make_executor(gqa[0]), make_executor(gqa[0])
    lack_memory(tight, monkeypatch, few_tokens)
    expected, _ = serve(roomy, depth)
    run, stats = serve(tight, depth)
    assert {end.error for end in run.ends.values()} == {None}
    assert run.tokens == expected.tokens
    assert sum(each.memory_ran_out for each in stats) == stats[0].memory_ran_out == 3


@pytest.mark.parametrize("depth", [0, 1])
def test_a_piece_may_be_without_the_request_that_has_a_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    write_checkpoint(tmp_path, vocab_size=420)
    shutil.copy(embedded_model_path() / "tokenizer.json", tmp_path)
    roomy, tight = make_executor(tmp_path), make_executor(tmp_path)
    lack_memory(tight, monkeypatch, few_tokens)
    submit, raised = tight.submit, []

    def watched(plan: StepPlan) -> TorchHandle:
        try:
            return submit(plan)
        except Exception as error:
            raised.append(error)
            raise

    monkeypatch.setattr(tight, "submit", watched)
    grammar = of_schema({"type": "array", "items": {"type": "integer"}, "minItems": 9})
    expected, _ = serve(roomy, depth, grammar)
    run, stats = serve(tight, depth, grammar)
    assert raised == []
    assert stats[0].memory_ran_out == 3
    assert {end.error for end in run.ends.values()} == {None}
    assert run.tokens == expected.tokens


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_of_which_no_token_fits_fails_alone(gqa: Gqa, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    roomy, tight = make_executor(gqa[0]), make_executor(gqa[0])
    expected, _ = serve(roomy, depth)
    computed = lack_memory(tight, monkeypatch, lambda batch: "r2" not in batch.request_ids)
    run, _ = serve(tight, depth)
    assert {name: end.error for name, end in run.ends.items() if end.error is not None} == {"r2": OUT_OF_MEMORY}
    assert run.tokens == expected.tokens | {"r2": []}
    assert tight._limit.max_tokens is None, "the others are computed at once as before"
    assert max(computed) > 100


def test_a_fault_beside_it_is_still_found(gqa: Gqa, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request raises, and all together do not fit."""
    roomy, tight = make_executor(gqa[0]), make_executor(gqa[0])
    expected, _ = serve(roomy, 0)
    lack_memory(tight, monkeypatch, few_tokens)
    short_of_memory = tight._runner.hidden_states

    def faulty(batch: InputBatch, giving_up: None) -> Tensor:
        hidden = short_of_memory(batch, giving_up)
        if "r1" in batch.request_ids:
            raise RuntimeError("shape mismatch")
        return hidden

    monkeypatch.setattr(tight._runner, "hidden_states", faulty)
    run, _ = serve(tight, 0)
    assert run.ends["r1"].error == INTERNAL_ERROR
    assert run.tokens == expected.tokens | {"r1": []}


# ---- its parts ---------------------------------------------------------------------------------------------------


def test_pieces_keep_the_order_of_the_step_and_sample_at_the_ends() -> None:
    parts = [
        ScheduledRequest("decode", [5], 7, [0], True, 3),
        ScheduledRequest("chunk", [6] * 10, 20, [1], False, 0),
        ScheduledRequest("prompt", [7] * 4, 0, [2], True, 0),
    ]
    plan = StepPlan.of_parts(0, parts)
    rest, pieces = Remainder(plan), []
    while (piece := rest.next_piece(6)) is not None:
        rest.done(piece)
        cut = piece.plan
        rows = zip(
            cut.request_ids, cut.num_computed.tolist(), cut.num_tokens.tolist(), cut.sample.tolist(), strict=True
        )
        pieces.append((piece.parts.tolist(), list(rows)))
    assert pieces == [
        ([0, 1], [("decode", 7, 1, True), ("chunk", 20, 5, False)]),
        ([1, 2], [("chunk", 25, 5, False), ("prompt", 0, 1, False)]),
        ([2], [("prompt", 1, 3, True)]),
    ]


def test_a_step_that_fits_is_its_own_piece() -> None:
    plan = StepPlan.of_parts(0, [ScheduledRequest("r", [5] * 6, 0, [0], True, 0)])
    for limit in (None, 6):
        piece = Remainder(plan).next_piece(limit)
        assert piece is not None
        assert piece.plan is plan


def test_nothing_is_left_of_a_request_that_is_given_up() -> None:
    parts = [ScheduledRequest(name, [5] * 3, 0, [0], True, 0) for name in ("a", "b")]
    rest = Remainder(StepPlan.of_parts(0, parts))
    rest.give_up(np.array([0]))
    piece = rest.next_piece(None)
    assert piece is not None
    assert piece.plan.request_ids == ["b"]


def test_the_limit_is_the_largest_piece_that_fitted_or_half() -> None:
    limit = TokenLimit()
    limit.fitted(1500)
    assert limit.lower(2048) == 1500
    assert limit.lower(1500) == 750, "what fitted once does no longer"
    assert limit.lower(3) == 1


def test_after_many_steps_that_were_cut_twice_as_much_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_pieces, "MORE_AFTER_STEPS", 3)
    limit = TokenLimit()
    limit.lower(200)
    limits = []
    for num_tokens in (150, 100, 150, 150, 150, 250, 250):
        limit.begin_step(num_tokens)
        limits.append(limit.max_tokens)
    assert limits == [100, 100, 100, 100, 200, 200, 200]

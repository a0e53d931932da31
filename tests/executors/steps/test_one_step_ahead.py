"""A step submitted before the result of the one before is in gives the tokens that it gives afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from neaptide.engine.params import SamplingParams
from neaptide.engine.steps.plan import ScheduledRequest, StepPlan
from neaptide.engine.table import PLACEHOLDER_TOKEN_ID
from neaptide.executors.torch import torch_executor
from neaptide.executors.torch.torch_executor import TorchExecutor
from tests.executors.driver import VOCAB, Driver, Track, make_executor, random_prompt

Gqa = tuple[Path, LlamaForCausalLM]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 3, "temperature": 1.2, "top_k": 40, "top_p": 0.9},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "frequency": {"seed": 4, "temperature": 0.9, "frequency_penalty": 1.5, "presence_penalty": 0.7},
    "bias": {"temperature": 0.0, "logit_bias": {7: 4.0, 9: -100.0}, "min_tokens": 6},
}


@pytest.fixture(scope="module")
def executor(gqa: Gqa) -> TorchExecutor:
    return make_executor(gqa[0])


def run_all(executor: TorchExecutor, depth: int, chunk: int) -> dict[str, Track]:
    """Requests of every kind, the last joining when the others are at work; their state is dropped afterwards."""
    driver = Driver(executor, seed=depth, depth=depth)
    for index, (name, fields) in enumerate(PARAMS.items()):
        driver.add(name, random_prompt(9 + 7 * index, index), SamplingParams(**fields))
    driver.run(3, chunk)
    driver.add("late", random_prompt(25, 99))
    driver.run(12, chunk)
    tracks = dict(driver.tracks)
    for name in tracks:
        driver.finish(name)
    executor.submit(StepPlan.of_parts(0, [], finished_ids=driver.finished)).wait()
    return tracks


@pytest.mark.parametrize("chunk", [6, 1000])
def test_the_same_tokens_as_one_step_after_the_other(executor: TorchExecutor, chunk: int) -> None:
    after, ahead = (run_all(executor, depth, chunk) for depth in (0, 1))
    for name, track in ahead.items():
        assert len(track.output) == 12
        assert PLACEHOLDER_TOKEN_ID not in track.output
        assert track.output == after[name].output, name
        assert [record.token_id for record in track.logprobs] == [r.token_id for r in after[name].logprobs]
        assert [record.token_id for record in track.prompt_logprobs] == [
            r.token_id for r in after[name].prompt_logprobs
        ]


def test_a_request_whose_logits_are_not_finite_fails_alone_one_step_late(gqa: Gqa) -> None:
    executor = make_executor(gqa[0])
    alone = Driver(executor)
    expected = alone.add("alone", random_prompt(12, 1))
    alone.run(6)
    with torch.inference_mode():
        executor._runner.model.embedding[0] = float("nan")
    driver = Driver(executor, seed=1, depth=1)
    good, bad = driver.add("good", random_prompt(12, 1)), driver.add("bad", [5, 0, 7])
    driver.run(6)
    assert (good.error, good.output) == (None, expected.output)
    assert (bad.error, bad.output) == ("numerical_error", [])


def test_a_placeholder_that_nothing_was_sampled_for_is_no_token(executor: TorchExecutor) -> None:
    driver = Driver(executor, depth=1)
    driver.add("r", random_prompt(5, 1))
    driver.submit({"r": 3})  # it does not reach the end of the prompt
    track = driver.tracks["r"]
    part = ScheduledRequest("r", [PLACEHOLDER_TOKEN_ID], 5, track.blocks, True, 1)
    result = executor.submit(StepPlan.of_parts(9, [part])).wait()
    assert result.errors == {"r": "invalid_token"}
    executor.submit(StepPlan.of_parts(10, [], finished_ids=["r"]))


@pytest.mark.parametrize("fields", [PARAMS["greedy"], PARAMS["repetition"]], ids=["greedy", "repetition"])
def test_a_step_that_raised_after_sampling_can_be_submitted_again_in_parts(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    prompts = {f"r{index}": random_prompt(10 + index, index) for index in range(4)}
    expected = Driver(executor)
    for name, prompt in prompts.items():
        expected.add(f"expected-{name}", prompt, SamplingParams(**fields))
    expected.run(3)

    driver = Driver(executor, seed=1, depth=1)
    for name, prompt in prompts.items():
        driver.add(name, prompt, SamplingParams(**fields))
    driver.submit({name: len(prompt) for name, prompt in prompts.items()})
    driver.submit(dict.fromkeys(prompts, 1))
    driver.wait()
    parts = [
        ScheduledRequest(name, [PLACEHOLDER_TOKEN_ID], len(prompt) + 1, driver.tracks[name].blocks, True, 2)
        for name, prompt in prompts.items()
    ]
    with monkeypatch.context() as patched:
        patched.setattr(TorchExecutor, "_score_prompts", lambda *_: (_ for _ in ()).throw(RuntimeError("late")))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="late"):
                executor.submit(StepPlan.of_parts(9, parts))
    for half in (parts[:1], parts[1:]):
        plan = StepPlan.of_parts(9, half)
        sampled = executor.submit(plan).wait().tokens_by_id(plan)
        for part in half:
            track = expected.tracks[f"expected-{part.request_id}"]
            assert sampled[part.request_id] == track.output[2]


def test_submitting_reads_no_token_on_the_host_unless_penalties_need_it(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    wait = torch_executor.SampledRow.wait
    monkeypatch.setattr(torch_executor.SampledRow, "wait", lambda row: (waits.append("wait"), wait(row))[1])
    driver = Driver(executor, depth=1)
    for name in ("greedy", "seeded", "logprobs", "bias"):
        driver.add(f"w-{name}", random_prompt(8, 1), SamplingParams(**PARAMS[name]))
    driver.run(5)
    assert waits == []
    driver.add("w-frequency", random_prompt(8, 1), SamplingParams(**PARAMS["frequency"]))
    driver.run(9)
    assert len(waits) == 8  # its first token comes from the prompt


def test_tokens_beyond_the_vocabulary_stay_refused(executor: TorchExecutor) -> None:
    driver = Driver(executor, depth=1)
    bad, good = driver.add("beyond", [5, VOCAB]), driver.add("within", [5, VOCAB - 1])
    driver.run(2)
    assert (bad.error, len(good.output)) == ("invalid_token", 2)
    part = ScheduledRequest("within", [VOCAB], 3, good.blocks, True, 2)  # in the place of a token that was sampled
    assert executor.submit(StepPlan.of_parts(9, [part])).wait().errors == {"within": "invalid_token"}

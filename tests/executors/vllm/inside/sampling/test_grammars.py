"""Outputs follow their grammars on vLLM's samplers: masks are ours, vLLM applies them."""

import json
import os
import re
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from neaptide.engine.params import GRAMMAR_ERROR, INTERNAL_ERROR, FinishReason
from neaptide.executors.contract import StartedExecutor
from tests.executors.grammars.cases import SCHEMAS, masks_fail_for, of_schema
from tests.executors.vllm.inside.faults import vllm
from tests.executors.vllm.inside.runs import Run, prompts

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET")), reason="Triton's interpreter does not run the kernel that applies masks"
)
Checkpoint = tuple[Path, PreTrainedModel]

PROMPTS = prompts(9, seed=21, high=20)


def ask_all(run: Run) -> None:
    """Every schema, greedy and drawn, beside free text."""
    for index, schema in enumerate(SCHEMAS):
        for k, temperature in enumerate((0.0, 1.0)):
            run.add(
                f"{index} {temperature}",
                PROMPTS[2 * index + k],
                temperature=temperature,
                seed=index,
                grammar=of_schema(schema),
                ignore_eos=False,
                max_tokens=100,
            )
    run.add("free", PROMPTS[8])


@pytest.fixture
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint[0] / "tokenizer.json"))


def assert_valid(run: Run, tokenizer: Tokenizer) -> None:
    for name, tokens in run.tokens.items():
        if name[0] in "0123":
            text = tokenizer.decode(tokens)
            assert run.ends[name].finish_reason is FinishReason.STOP, text
            jsonschema.validate(json.loads(text), SCHEMAS[int(name[0])])


@pytest.mark.parametrize("depth", [0, 1])
def test_what_a_random_model_says_is_valid(started: StartedExecutor, tokenizer: Tokenizer, depth: int) -> None:
    run = Run(started.executor, overlap_depth=depth)
    ask_all(run)
    run.finish()
    assert_valid(run, tokenizer)


def test_one_step_ahead_gives_the_same_tokens(started: StartedExecutor) -> None:
    after, ahead = Run(started.executor, overlap_depth=0), None
    ask_all(after)
    after.finish()
    ahead = Run(started.executor, overlap_depth=1)
    ask_all(ahead)
    ahead.finish()
    assert ahead.tokens == after.tokens


def test_a_preemption_every_second_step_changes_nothing(started: StartedExecutor) -> None:
    calm = Run(started.executor)
    ask_all(calm)
    calm.finish()
    rough = Run(started.executor)
    ask_all(rough)
    steps = 0
    while rough.core.has_work:
        rough.step()
        steps += 1
        running = [r for r in rough.core.scheduler.queues.running_online.values() if r.num_output_tokens]
        if steps % 2 == 0 and running and not rough.core.has_step_in_flight:
            rough.preempt(running[steps // 2 % len(running)])
    assert sum(end.num_preemptions for end in rough.ends.values()) > 5
    assert rough.tokens == calm.tokens


def test_free_text_beside_it_is_what_it_is_alone(started: StartedExecutor) -> None:
    alone = Run(started.executor)
    alone.add("free", PROMPTS[8])
    alone.finish()
    beside = Run(started.executor)
    ask_all(beside)
    beside.finish()
    assert beside.tokens["free"] == alone.tokens["free"]


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(
    started: StartedExecutor, tokenizer: Tokenizer
) -> None:
    run = Run(started.executor)
    ask_all(run)
    run.add("broken", PROMPTS[0], grammar="no grammar at all", logprobs=2)
    run.finish()
    assert (run.ends["broken"].error, run.tokens["broken"]) == (GRAMMAR_ERROR, [])
    assert len(run.tokens["free"]) > 0
    assert_valid(run, tokenizer)


def test_a_failure_of_the_mask_thread_is_taken_apart(
    started: StartedExecutor, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks_fail_for("poison", monkeypatch)
    run = Run(started.executor)
    run.add("poison", PROMPTS[0], grammar=of_schema(SCHEMAS[0]))
    ask_all(run)
    run.finish()
    assert run.ends["poison"].error == INTERNAL_ERROR
    assert_valid(run, tokenizer)


def test_logprobs_are_of_what_the_grammar_allows(started: StartedExecutor, tokenizer: Tokenizer) -> None:
    run = Run(started.executor)
    run.add("a", PROMPTS[0], max_tokens=1, logprobs=5, grammar='start: "~" | "^"')
    run.finish()
    (scores,) = run.logprobs["a"]
    assert {tokenizer.decode([token]) for token in scores.top_ids} == {"~", "^"}
    assert re.fullmatch("[~^]", tokenizer.decode(run.tokens["a"]))


def test_ended_requests_leave_nothing_behind(started: StartedExecutor) -> None:
    run = Run(started.executor)
    ask_all(run)
    run.finish()
    run.add("last", PROMPTS[0], max_tokens=1)  # its step tells the executor of the ends
    run.finish()
    assert not vllm(started).grammars.request_ids

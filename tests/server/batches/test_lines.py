"""A batch line's body becomes what the same body would become online."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from neaptide.engine.messages import RequestOutput, TokenLogprobs
from neaptide.engine.params import FinishReason, SamplingParams, Tier
from neaptide.server.batches.lines import Assembler, ContextCompiler
from neaptide.server.openai.endpoints import CHAT, COMPLETIONS, RESPONSES
from neaptide.server.openai.prepare import prepare
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_ID, USER, make_context

SAMPLING = {
    "max_tokens": 8,
    "min_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.6,
    "top_k": 5,
    "min_p": 0.05,
    "presence_penalty": 0.3,
    "frequency_penalty": -0.4,
    "repetition_penalty": 1.2,
    "logit_bias": {"9": 3.5},
    "seed": 11,
    "stop_token_ids": [12],
    "ignore_eos": True,
}


def test_every_sampling_parameter_of_a_line_reaches_the_engine(tokenizer: Tokenizer) -> None:
    compiled = ContextCompiler(make_context(tokenizer)).compile(CHAT, {"messages": USER, **SAMPLING})
    assert compiled.params == [
        SamplingParams(
            max_tokens=8,
            min_tokens=2,
            temperature=0.7,
            top_p=0.6,
            top_k=5,
            min_p=0.05,
            presence_penalty=0.3,
            frequency_penalty=-0.4,
            repetition_penalty=1.2,
            logit_bias={9: 3.5},
            seed=11,
            stop_token_ids=(12,),
            ignore_eos=True,
        )
    ]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": USER, "n": 3, "logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "echo": True, "stop": "x"}),
    ],
)
def test_a_line_compiles_to_what_the_online_request_is(
    tokenizer: Tokenizer, endpoint: str, body: dict[str, Any]
) -> None:
    context, body = make_context(tokenizer), {**body, **SAMPLING}
    online = prepare(endpoint, body, context, Tier.DEFAULT)
    compiled = ContextCompiler(context).compile(endpoint, body)
    assert compiled.prompts == online.requests
    assert compiled.params == [online.params_for(choice) for choice in range(online.num_choices)]
    assert compiled.wants_stream == bool(online.form.stop)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": 2**63 - 1}}}
OWN_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": USER}),
    (CHAT, {"messages": USER, "model": "other-name", "n": 2, "stop": ["b", "\u2603"], "min_tokens": 1}),
    (CHAT, {"messages": USER, "stop": "a", "include_stop_str_in_output": True, "return_token_ids": True}),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 1, "skip_special_tokens": False}),
    (CHAT, {"messages": USER, "tools": [TOOL], "parallel_tool_calls": False}),
    (COMPLETIONS, {"prompt": ["a", "bc"], "n": 2, "echo": True}),
    (COMPLETIONS, {"prompt": "abc", "logprobs": 1, "echo": True, "stop_token_ids": [12]}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True}),
    (
        RESPONSES,
        {"input": "hi", "instructions": "Be brief.", "metadata": {"k": "v"}, "tools": [OWN_TOOL], "top_p": 0.5},
    ),
]
ANSWERS = ("cab", '<tool_call>{"name": "f", "arguments": {}}</tool_call>')


def answered(assembler: Assembler, prompts: Sequence[list[int]], tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    """The body of a reply in which each choice is this text, without what differs from one reply to the next."""
    for choice, prompt in enumerate(prompts):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        scores = [TokenLogprobs(token, -1.0, [token], [-1.0]) for token in tokens]
        of_prompt = [TokenLogprobs(token, -2.0, [token], [-2.0]) for token in prompt[1:]]
        output = RequestOutput("r", tokens, scores, of_prompt, num_prompt_tokens=len(prompt), num_cached_tokens=1)
        output.finish_reason, output.stop_token_id = FinishReason.STOP, 12
        assembler.feed(choice, output)
    assert assembler.finished
    body = json.loads(json.dumps(assembler.body("req_1")))
    return {
        name: _without_ids(value)
        for name, value in body.items()
        if name not in ("created", "created_at", "completed_at")
    }


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(entry) for name, entry in value.items() if name not in ("id", "call_id")}
    return [_without_ids(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize(("endpoint", "body"), BODIES)
def test_a_stored_reply_is_that_of_the_body(
    tokenizer: Tokenizer, endpoint: str, body: dict[str, Any], text: str
) -> None:
    context = make_context(tokenizer)
    context.model_aliases, context.wall_clock = ("other-name",), lambda: 1_800_000_000.0
    compiler = ContextCompiler(context)
    line = compiler.compile(endpoint, {"model": MODEL_ID, **body})
    assert line.reply is not None
    stored = answered(compiler.stored_assembler(line.reply), line.prompts, tokenizer, text)
    assert stored == answered(compiler.assembler(endpoint, {"model": MODEL_ID, **body}), line.prompts, tokenizer, text)


def test_lines_that_ask_for_the_same_have_equal_replies_of_a_few_bytes(tokenizer: Tokenizer) -> None:
    compiler = ContextCompiler(make_context(tokenizer))
    lines = [
        compiler.compile(CHAT, {"messages": [{"role": "user", "content": "word " * count}], "temperature": count / 9})
        for count in (1, 9)
    ]
    assert lines[0].reply == lines[1].reply
    assert len(lines[0].reply or b"") < 100


@pytest.mark.parametrize("reply", [b"", b"\xc1", b"\x80", b"\x81\xa3new\xc3"])
def test_a_reply_of_an_unknown_form_is_refused(tokenizer: Tokenizer, reply: bytes) -> None:
    with pytest.raises(ValueError, match="no form of a reply"):
        ContextCompiler(make_context(tokenizer)).stored_assembler(reply)

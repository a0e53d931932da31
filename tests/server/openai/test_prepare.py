"""What batch lines and online requests share, without HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest

from neaptide.engine.messages import RequestOutput
from neaptide.engine.params import FinishReason, Tier
from neaptide.server.batches.lines import ContextCompiler
from neaptide.server.context import GenerationDefaults
from neaptide.server.http.errors import ApiError, EngineFailedError, InvalidRequestError
from neaptide.server.openai.endpoints import CHAT, COMPLETIONS
from neaptide.server.openai.prepare import parse_body, prepare
from neaptide.server.openai.respond import ResponseAssembler
from neaptide.server.openai.schemas import (
    Body,
    ChatBody,
    ChatMessage,
    CompletionBody,
    ContentPart,
    DetokenizeBody,
    FunctionDefinition,
    StreamOptions,
    TokenizeChatBody,
    TokenizeTextBody,
    Tool,
    ToolCallParam,
)
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import USER, make_context

BODY: dict[str, Any] = {"messages": USER, "max_tokens": 8}


def test_a_batch_line_is_flex_to_its_reader_and_batch_to_the_engine(tokenizer: Tokenizer) -> None:
    prepared = prepare(CHAT, {**BODY, "service_tier": "priority"}, make_context(tokenizer), Tier.BATCH)
    assert (prepared.tier, prepared.form.service_tier) == (Tier.BATCH, "flex")


def test_a_batch_line_cannot_stream(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError) as caught:
        prepare(CHAT, {**BODY, "stream": True}, make_context(tokenizer), Tier.BATCH)
    assert (caught.value.status, caught.value.code) == (400, "streaming_unsupported")


@pytest.mark.parametrize("body", [None, 5, "x", [], [{}]])
def test_a_body_that_is_no_object(tokenizer: Tokenizer, body: object) -> None:
    with pytest.raises(ApiError) as caught:
        prepare(CHAT, body, make_context(tokenizer))
    assert caught.value.status == 400


def test_an_unknown_endpoint(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError) as caught:
        prepare("/v1/embeddings", BODY, make_context(tokenizer))
    assert (caught.value.status, caught.value.code) == (404, "unknown_url")


@pytest.mark.parametrize(
    ("fields", "num_ends"),
    [
        ({"stop_token_ids": [6, 7]}, None),
        ({"stop_token_ids": [6, 7, 8, 8, 7], "ignore_eos": True}, None),
        ({"stop_token_ids": [5, 6, 7]}, None),  # 5 is the model's own
        ({"stop_token_ids": [6, 7, 8]}, 4),
        ({"stop_token_ids": [6, 7, 8, 9, 10], "ignore_eos": True}, 5),
        ({"stop_token_ids": [6, 7, 8], "min_tokens": 0}, None),
    ],
)
@pytest.mark.parametrize("of_another_process", [False, True])
def test_min_tokens_holds_back_as_many_ends_as_the_executor_can(
    tokenizer: Tokenizer, fields: dict[str, Any], num_ends: int | None, of_another_process: bool
) -> None:
    context = make_context(tokenizer)
    context.max_masked_ends = 3
    compiler = ContextCompiler(context)
    if of_another_process:
        compiler = compiler.recipe().compiler()
    body = BODY | {"min_tokens": 2} | fields
    if num_ends is None:
        assert compiler.compile(CHAT, body).params[0].min_tokens == body["min_tokens"]
        return
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(CHAT, body)
    assert (caught.value.status, caught.value.param) == (400, "stop_token_ids")
    assert str(caught.value) == (
        f"With min_tokens, at most 3 stop tokens are possible, including the model's own; the request has {num_ends}."
    )


def test_line_to_body_without_a_loop(tokenizer: Tokenizer) -> None:
    prepared = prepare(CHAT, {**BODY, "n": 2, "stop": ["b"], "seed": 2**63 - 1}, make_context(tokenizer), Tier.BATCH)
    assert len(prepared.requests) == 2
    assert [prepared.params_for(choice).seed for choice in (0, 1)] == [2**63 - 1, 0]
    assembler = ResponseAssembler.of(prepared)
    assembler.feed(1, RequestOutput("r:1", tokenizer.encode("xyz"), num_cached_tokens=5))
    assembler.feed(0, RequestOutput("r:0", tokenizer.encode("abc"), num_cached_tokens=3))
    assert assembler.stop_hit == [True, False]
    finished = [assembler.finished]
    # The aborted row's terminal output comes late and changes nothing.
    assembler.feed(0, RequestOutput("r:0", tokenizer.encode("more"), finish_reason=FinishReason.STOP))
    assembler.feed(1, RequestOutput("r:1", [], finish_reason=FinishReason.LENGTH, num_cached_tokens=5))
    finished.append(assembler.finished)
    assert finished == [False, True]
    body = assembler.body("batch_req_1")
    assert body["id"] == "chatcmpl-batch_req_1"
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a", "xyz"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert "metrics" not in body
    json.dumps(body, allow_nan=False)
    assert json.loads(assembler.encoded("batch_req_1")) == body


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_failed_choice_has_an_error_and_no_body(tokenizer: Tokenizer, reason: FinishReason) -> None:
    assembler = ResponseAssembler.of(prepare(CHAT, BODY, make_context(tokenizer)))
    assembler.feed(0, RequestOutput("r", [7], finish_reason=reason, error="secret"))
    assert assembler.finished
    assert assembler.error is not None
    assert isinstance(assembler.error, EngineFailedError) is (reason is FinishReason.ERROR)
    with pytest.raises(ApiError):
        assembler.body("x")


def test_token_limit_is_per_prompt(tokenizer: Tokenizer) -> None:
    context = make_context(tokenizer, max_model_len=20)
    body = {"prompt": [[7] * 5, [7] * 19], "max_tokens": 10, "n": 2}
    prepared = prepare(COMPLETIONS, body, context)
    assert [prepared.params_for(choice).max_tokens for choice in range(4)] == [10, 10, 1, 1]


def test_many_choices_without_a_limit_share_the_allowance(tokenizer: Tokenizer) -> None:
    prepared = prepare(CHAT, {"messages": USER, "n": 128}, make_context(tokenizer))
    assert prepared.params_for(0).max_tokens == 8 * 8192 // 128


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, GenerationDefaults()),
        ({}, GenerationDefaults()),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}, GenerationDefaults(0.6, 0.9, 20)),
        ({"do_sample": False, "temperature": 0.6}, GenerationDefaults()),
        (
            {"repetition_penalty": 1.1, "min_p": 0.05, "max_new_tokens": 64},
            GenerationDefaults(min_p=0.05, repetition_penalty=1.1, max_tokens=64),
        ),
        ({"do_sample": False, "repetition_penalty": 1.1}, GenerationDefaults(repetition_penalty=1.1)),
        ({"temperature": None, "top_k": None}, GenerationDefaults()),
    ],
)
def test_defaults_of_the_model(tmp_path: Path, config: dict[str, Any] | None, expected: GenerationDefaults) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert GenerationDefaults.load(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"temperature": "warm"}', "temperature must be a number from 0 to 2, not 'warm'"),
        ('{"temperature": [0.7]}', r"temperature must be a number from 0 to 2, not \[0.7\]"),
        ('{"temperature": NaN}', "temperature must be a number from 0 to 2, not nan"),
        ('{"temperature": true}', "temperature must be a number from 0 to 2, not True"),
        ('{"top_p": 1.01}', "top_p must be a number from 0 to 1, not 1.01"),
        ('{"top_k": 4294967296}', "top_k must be a number from -1 to 2147483647, not 4294967296"),
    ],
)
def test_defaults_that_no_request_could_ask_for_are_refused_at_start(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"^generation_config.json: {words}$"):
        GenerationDefaults.load(tmp_path)


def test_defaults_of_the_model_give_way_to_the_body(tokenizer: Tokenizer) -> None:
    context = make_context(tokenizer)
    context.generation_defaults = GenerationDefaults(0.6, 0.9, 20, 0.05, 1.1, 64)
    plain, asked = prepare(CHAT, BODY, context), prepare(CHAT, {**BODY, "temperature": 0, "top_k": -1}, context)
    assert (plain.params.temperature, plain.params.top_p, plain.params.top_k) == (0.6, 0.9, 20)
    assert (asked.params.temperature, asked.params.top_p, asked.params.top_k) == (0, 0.9, 0)
    assert prepare(CHAT, {**BODY, "top_p": 0}, context).params.temperature == 0
    assert (plain.params.min_p, plain.params.repetition_penalty) == (0.05, 1.1)
    asked = prepare(CHAT, {**BODY, "min_p": 0, "repetition_penalty": 1, "max_tokens": 100}, context)
    assert (asked.params.min_p, asked.params.repetition_penalty) == (0, 1)
    free = {name: value for name, value in BODY.items() if name != "max_tokens"}
    assert (prepare(CHAT, free, context).params_for(0).max_tokens, asked.params_for(0).max_tokens) == (64, 100)


def test_tools_reach_the_template_as_they_were_sent(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def note(self: Tokenizer, messages: Any, **more: Any) -> list[int]:
        seen.append((messages, more["tools"]))
        return [7]

    monkeypatch.setattr(Tokenizer, "encode_chat", note)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": None}}, "extra": 1}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "sys"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "tool_call_id": "c1",
        },
    ]
    for choice, expected in ((None, [tool]), ("auto", [tool]), ("none", None)):
        prepare(CHAT, {"messages": messages, "tools": [tool], "tool_choice": choice}, make_context(tokenizer))
        assert seen[-1][1] == expected
    first, second, third = seen[-1][0]
    assert first == {"role": "developer", "content": "sys"}
    assert second["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert third == {"role": "tool", "content": "a\nb", "tool_call_id": "c1"}


VALID: dict[type[Body], dict[str, Any]] = {
    ChatBody: {"messages": USER},
    CompletionBody: {"prompt": "x"},
    TokenizeChatBody: {"messages": USER},
    TokenizeTextBody: {"prompt": "x"},
    DetokenizeBody: {"tokens": [7]},
    StreamOptions: {},
    ChatMessage: {"role": "user"},
    ContentPart: {"type": "text", "text": "x"},
    Tool: {"type": "function", "function": {"name": "f"}},
    FunctionDefinition: {"name": "f"},
    ToolCallParam: {"function": {"name": "f"}},
}


@pytest.mark.parametrize("model", VALID)
def test_null_means_omitted_for_every_optional_field(model: type[Body]) -> None:
    nulls = dict.fromkeys(set(model.model_fields) - set(VALID[model]))
    assert parse_body(model, nulls | VALID[model]) == parse_body(model, VALID[model])


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": ""},
        {"cache_salt": "x" * 257},
        {"cache_salt": 5},
    ],
)
def test_cache_salts_are_short_texts(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        prepare(CHAT, {**BODY, **fields}, make_context(tokenizer))
    assert (caught.value.status, caught.value.param) == (400, "cache_salt")


def test_a_batch_line_has_no_cache_salt_of_its_own(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError) as caught:
        prepare(CHAT, {**BODY, "cache_salt": "a"}, make_context(tokenizer), Tier.BATCH)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "cache_salt")

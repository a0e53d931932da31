"""Every refusal: its status, its code, the parameter it names; and that it never repeats what was sent."""

import json
import re
from typing import Any

import openai
import pytest

from neaptide.server.http.errors import MAX_MESSAGE_CHARS
from neaptide.server.http.jsonbody import parse_object
from tests.server.conftest import MODEL_ID, USER, Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

BAD_CHAT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": [5]}, "invalid_type", "messages.0"),
    ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages.0.role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "missing_required_parameter", "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "unsupported_parameter",
        "messages.0.content.0.type",
    ),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": "1"}, "invalid_type", "temperature"),
    ({"temperature": True}, "invalid_type", "temperature"),
    ({"top_p": 1.1}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"top_k": 1.5}, "invalid_type", "top_k"),
    ({"min_p": 2}, "invalid_value", "min_p"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 129}, "invalid_value", "n"),
    ({"n": True}, "invalid_type", "n"),
    ({"n": 16, "max_tokens": 8000}, "invalid_value", "n"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": "5"}, "invalid_type", "max_tokens"),
    ({"max_tokens": True}, "invalid_type", "max_tokens"),
    ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "invalid_value", "min_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "invalid_value", "stop"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": [""]}, "invalid_value", "stop.0"),
    ({"stop": 5}, "invalid_type", "stop"),
    ({"stream": "yes"}, "invalid_type", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "invalid_type", "stream_options.include_usage"),
    ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -2.5}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias.5"),
    ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"416": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
    ({"logprobs": 5}, "invalid_type", "logprobs"),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"seed": 1.5}, "invalid_type", "seed"),
    ({"seed": 2**63}, "invalid_value", "seed"),
    ({"stop_token_ids": [416]}, "invalid_value", "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids.0"),
    ({"service_tier": "gold"}, "invalid_value", "service_tier"),
    ({"ttft_slo_ms": 0}, "invalid_value", "ttft_slo_ms"),
    ({"ttft_slo_ms": 5e-324}, "invalid_value", "ttft_slo_ms"),
    ({"tpot_slo_ms": 5e-324}, "invalid_value", "tpot_slo_ms"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "missing_required_parameter",
        "response_format.json_schema.name",
    ),
    ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "unsupported_parameter", "min_tokens"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "unsupported_parameter", "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "invalid_value", "guided_regex"),
    ({"response_format": {"type": "poem"}}, "invalid_value", "response_format.type"),
    ({"response_format": {}}, "missing_required_parameter", "response_format.type"),
    ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "unsupported_parameter", "structured_outputs.structural_tag"),
    ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "invalid_value",
        "structured_outputs.disable_additional_properties",
    ),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "invalid_value",
        "structured_outputs.whitespace_pattern",
    ),
    ({"response_format": {"type": "text", "schema": {}}}, "unsupported_parameter", "response_format.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}, "regex": "a"}},
        "unsupported_parameter",
        "response_format.regex",
    ),
    ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "invalid_value", "response_format.schema"),
    ({"guided_json": 3}, "invalid_type", "guided_json"),
    ({"guided_json": {"contentEncoding": "base64"}}, "invalid_value", "guided_json"),
    ({"guided_grammar": "root ::= a"}, "invalid_value", "guided_grammar"),
    ({"tools": [{"type": "custom"}]}, "invalid_value", "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools.0.function"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "unsupported_parameter", "tool_choice.type"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "another"}}},
        "invalid_value",
        "tool_choice.function.name",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},  # as in responses
        "missing_required_parameter",
        "tool_choice.function",
    ),
    ({"tools": [TOOL], "tool_choice": {}}, "missing_required_parameter", "tool_choice.type"),
    ({"tools": [TOOL], "parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
    ({"chat_template": "{{ 7 }}"}, "unsupported_parameter", "chat_template"),
    ({"chat_template_kwargs": {"messages": "x"}}, "unsupported_parameter", "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context_length_exceeded", "messages"),
    ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "context_length_exceeded", "messages"),
]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": None}, "missing_required_parameter", "prompt"),
    ({"prompt": ""}, "invalid_value", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": [[]]}, "invalid_value", "prompt"),
    ({"prompt": 5}, "invalid_type", "prompt"),
    ({"prompt": [1, "a"]}, "invalid_type", "prompt.0"),
    ({"prompt": [1.5]}, "invalid_type", "prompt.0"),
    ({"prompt": [-1]}, "invalid_value", "prompt.0"),
    ({"prompt": [416]}, "invalid_value", "prompt"),
    ({"prompt": [[6], [416]]}, "invalid_value", "prompt.1"),
    ({"prompt": [[6]] * 2049}, "invalid_value", "prompt"),
    ({"prompt": [6] * 8192}, "context_length_exceeded", "prompt"),
    ({"prompt": "x" * 70_000}, "context_length_exceeded", "prompt"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"logprobs": 21}, "invalid_value", "logprobs"),
    ({"logprobs": True}, "invalid_type", "logprobs"),
    ({"best_of": 3}, "unsupported_parameter", "best_of"),
    ({"suffix": "end"}, "unsupported_parameter", "suffix"),
]


def _check_envelope(reply: Any) -> dict[str, Any]:
    body = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) <= MAX_MESSAGE_CHARS
    assert error["code"] is None or isinstance(error["code"], str)
    # Nothing of our insides: paths, addresses, line numbers, class names.
    assert not re.search(r"/[a-z]+/|0x[0-9a-f]|line \d|Error\b|Traceback", error["message"])
    assert reply.headers["x-request-id"]
    return error


@pytest.mark.parametrize(("fields", "code", "param"), BAD_CHAT)
@pytest.mark.acceptance("A24", "fields of a chat that are refused")
async def test_bad_chat_field(server: Server, fields: dict[str, Any], code: str, param: str | None) -> None:
    reply = await server.http.post(CHAT, json={"model": MODEL_ID, "messages": USER, **fields})
    assert reply.status_code == 400
    error = _check_envelope(reply)
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert server.engine.requests == []


async def test_a_name_that_may_not_be_is_told_what_it_may_be(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "my name", "schema": {}}}
    reply = await server.http.post(CHAT, json={"messages": USER, "response_format": form})
    error = _check_envelope(reply)
    assert error["param"] == "response_format.json_schema.name"
    assert "'^[A-Za-z0-9_-]+$'" in error["message"]
    assert "my name" not in error["message"]


@pytest.mark.parametrize(("fields", "code", "param"), BAD_COMPLETIONS)
@pytest.mark.acceptance("A24", "fields of a completion that are refused")
async def test_bad_completions_field(server: Server, fields: dict[str, Any], code: str, param: str | None) -> None:
    reply = await server.http.post(COMPLETIONS, json={"model": MODEL_ID, "prompt": "x", **fields})
    assert reply.status_code == 400
    error = _check_envelope(reply)
    assert (error["code"], error["param"]) == (code, param)
    assert server.engine.requests == []


async def test_a_stream_with_a_bad_field_has_a_real_status(server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, stream=True, temperature=9)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/dashboard/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
    ],
)
async def test_routes_that_are_not_there(server: Server, method: str, path: str, status: int, code: str) -> None:
    reply = await server.http.request(method, path)
    assert reply.status_code == status
    assert _check_envelope(reply)["code"] == code


async def test_unknown_model_is_404_and_absent_or_empty_is_ours(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await server.openai.chat.completions.create(model="gpt-9", messages=USER)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert f"this server serves {MODEL_ID!r}" in caught.value.message
    assert "gpt-9" not in caught.value.message
    for body in ({}, {"model": ""}, {"model": None}):
        reply = await server.http.post(CHAT, json={"messages": USER, "max_tokens": 1, **body})
        assert reply.json()["model"] == MODEL_ID


@pytest.mark.acceptance("A28", "bodies whose text must not come back", count=8)
async def test_input_is_never_echoed(server: Server) -> None:
    canary = "canary-7f3a"
    bodies: list[dict[str, Any]] = [
        {"messages": canary},
        {"messages": [{"role": canary, "content": canary}]},
        {"messages": USER, "service_tier": canary},
        {"messages": USER, "model": canary},
        {"messages": USER, "tools": [{"type": canary, "function": {"name": canary}}]},
        {"messages": USER, "response_format": {"type": canary}},
        {"messages": USER, "temperature": canary * 1000},
        {"messages": USER, "tools": [{"type": "function", "function": {"name": canary + " "}}]},
    ]
    for body in bodies:
        reply = await server.http.post(CHAT, json=body)
        assert reply.status_code in (400, 404)
        assert canary not in reply.text
        assert len(reply.content) < 600


async def test_a_bug_is_500_in_the_envelope(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("secret at 0xdead")

    monkeypatch.setattr(type(server.context.tokenizer), "encode", broken)
    reply = await server.http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert reply.status_code == 500
    assert _check_envelope(reply)["code"] == "internal_error"
    assert reply.headers["x-request-id"] == "mine"


# ---- JSON ------------------------------------------------------------------------------------------------

_PROMPT = f'"model": "{MODEL_ID}", "prompt": "x"'

BAD_JSON: list[tuple[str, bytes, str | None]] = [
    ("NaN", b'{%s, "temperature": NaN}', "temperature"),
    ("Infinity", b'{%s, "temperature": Infinity}', "temperature"),
    ("minus infinity", b'{%s, "temperature": -Infinity}', "temperature"),
    ("overflow", b'{%s, "temperature": 1e400}', "temperature"),
    ("NaN in a free field", b'{%s, "metadata": {"a": [NaN]}}', "metadata.a.0"),
    ("2**70", b'{%s, "max_tokens": 1180591620717411303424}', "max_tokens"),
    ("5000 digits", b'{%s, "max_tokens": ' + b"9" * 5000 + b"}", "max_tokens"),
    ("true as int", b'{%s, "max_tokens": true}', "max_tokens"),
    ("surrogate in a value", b'{%s, "user": "\\ud800"}', "user"),
    ("surrogate in a prompt", b'{"prompt": "\\ud800"}', "prompt"),
    ("surrogate in a list", b'{"prompt": ["\\ud800"]}', "prompt.0"),
    ("surrogate in a free object", b'{"prompt": {"a": "\\ud800"}}', "prompt.a"),
    ("surrogate in a key", b'{%s, "\\udfff": 1}', None),
    ("duplicate keys", b'{%s, "n": 1, "n": 2}', "n"),
    ("duplicate keys inside", b'{%s, "metadata": {"a": 1, "a": 1}}', "a"),
    ("deep", b'{%s, "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ("rather deep", b'{%s, "metadata": ' + b"[" * 200 + b"]" * 200 + b"}", None),
    ("invalid UTF-8", b'{%s, "user": "\xff"}', None),
    ("UTF-16", f"{{{_PROMPT}}}".encode("utf-16"), None),
    ("list", b"[{%s}]", None),
    ("text", b'"x"', None),
    ("empty", b"", None),
    ("cut off", b"{%s", None),
    ("trailing", b"{%s} x", None),
    ("control character", b'{%s, "user": "a\nb"}', None),
]


@pytest.mark.parametrize(("raw", "param"), [pytest.param(raw, param, id=name) for name, raw, param in BAD_JSON])
@pytest.mark.acceptance("A23", "JSON that is refused online")
async def test_json_that_is_refused(server: Server, raw: bytes, param: str | None) -> None:
    raw = raw.replace(b"%s", _PROMPT.encode())
    reply = await server.http.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert _check_envelope(reply)["param"] == param


@pytest.mark.parametrize("unit", [b"[],", b"{},", b"1,", b'"a",', b'"\\"",', b'{"a":1},', b'"\\\\",'])
@pytest.mark.acceptance("A23", "bodies of 10 MB in very many values, refused unparsed")
async def test_bodies_of_very_many_values_are_refused_unparsed(
    server: Server, monkeypatch: pytest.MonkeyPatch, unit: bytes
) -> None:
    def must_not_run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("parsed")

    raw = b'{"prompt": "x", "metadata": [' + unit * (10_000_000 // len(unit)) + b"1]}"
    with monkeypatch.context() as patch:
        patch.setattr("neaptide.server.http.jsonbody.json.loads", must_not_run)
        reply = await server.http.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert (reply.status_code, _check_envelope(reply)["code"]) == (400, "invalid_json")


async def test_a_text_may_have_any_number_of_marks(server: Server) -> None:
    body = {"prompt": '[{"a\\": 1}, \\"],' * 40_000}
    assert (await server.http.post(COMPLETIONS, json=body)).json()["error"]["code"] == "context_length_exceeded"


async def test_prompts_of_many_token_ids_are_parsed(server: Server) -> None:
    reply = await server.http.post(COMPLETIONS, json={"prompt": [[7] * 2000] * 200, "max_tokens": 1})
    assert reply.status_code == 200


def test_the_most_prompts_of_a_request_pass_the_structure_check() -> None:
    body = {"prompt": [[7] * 250] * 2048}
    assert parse_object(json.dumps(body).encode()) == body


async def test_json_that_is_fine(server: Server) -> None:
    for raw in (
        b'{"prompt": "a\\u0000b", "max_tokens": 1}',
        b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}',
        '{"prompt": "\\ud83d\\ude00 \u00e9", "max_tokens": 1}'.encode(),
        b'{"prompt": "a", "max_tokens": 1, "metadata": %s}' % json.dumps({str(i): [] for i in range(500)}).encode(),
    ):
        reply = await server.http.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
        assert reply.status_code == 200, raw


async def test_content_type_and_encoding(server: Server) -> None:
    raw = b'{"prompt": "x", "max_tokens": 1}'
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        reply = await server.http.post(COMPLETIONS, content=raw, headers={"content-type": media_type})
        assert (reply.status_code, _check_envelope(reply)["code"]) == (400, "invalid_content_type")
    headers = {"content-type": "application/json; charset=utf-8"}
    assert (await server.http.post(COMPLETIONS, content=raw, headers=headers)).status_code == 200
    reply = await server.http.post(COMPLETIONS, content=raw, headers={**headers, "content-encoding": "gzip"})
    assert reply.status_code == 415
    _check_envelope(reply)


async def test_body_is_capped_by_header_and_by_count(server: Server) -> None:
    headers = {"content-type": "application/json"}
    announced = await server.http.post(COMPLETIONS, content=b" " * 21_000_000, headers=headers)

    async def chunks() -> Any:
        for _ in range(21):
            yield b" " * (1 << 20)

    counted = await server.http.post(COMPLETIONS, content=chunks(), headers=headers)
    for reply in (announced, counted):
        assert reply.status_code == 413
        assert _check_envelope(reply)["code"] == "request_too_large"

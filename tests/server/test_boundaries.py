"""Parameters and JSON at their edges: the same answer to an online request and to a batch line."""

import json
from pathlib import Path
from typing import Any

import pytest

from neaptide.server.batches.checking.validate import Check, CheckReport, FileLimits, Validator
from neaptide.server.batches.lines import ContextCompiler
from neaptide.server.batches.storing.models import NewLine
from tests.server.conftest import MODEL_ID, USER, Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "x"}}
BOTH = (CHAT, COMPLETIONS)


def check_line(server: Server, tmp_path: Path, endpoint: str, raw_body: bytes) -> tuple[CheckReport, list[NewLine]]:
    """What the batch service makes of a file of one line with this body."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"custom_id": "a", "method": "POST", "url": "%s", "body": %s}' % (endpoint.encode(), raw_body))
    kept: list[NewLine] = []
    check = Check(endpoint, str(path), str(tmp_path / "job"), FileLimits())
    return Validator(check, ContextCompiler(server.context), kept.extend).run(), kept


# ---- parameters ------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, tuple[str, ...], dict[str, Any], str]] = [
    ("n 0", BOTH, {"n": 0}, "n"),
    ("n 129", BOTH, {"n": 129}, "n"),
    ("n 2**31", BOTH, {"n": 2**31}, "n"),
    ("n times max_tokens", BOTH, {"n": 128, "max_tokens": 513}, "n"),
    ("top_logprobs 21", (CHAT,), {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("top_logprobs alone", (CHAT,), {"top_logprobs": 1}, "top_logprobs"),
    ("logprobs 21", (COMPLETIONS,), {"logprobs": 21}, "logprobs"),
    ("logprobs -1", (COMPLETIONS,), {"logprobs": -1}, "logprobs"),
    ("best_of 2", (COMPLETIONS,), {"best_of": 2}, "best_of"),
    ("best_of 21", (COMPLETIONS,), {"best_of": 21}, "best_of"),
    ("2,049 prompts", (COMPLETIONS,), {"prompt": ["a"] * 2049}, "prompt"),
    ("17 prompts, n 128", (COMPLETIONS,), {"prompt": ["a"] * 17, "n": 128, "max_tokens": 1}, "prompt"),
    ("an empty prompt among others", (COMPLETIONS,), {"prompt": ["a", ""]}, "prompt"),
    ("prompt ids out of vocabulary", (COMPLETIONS,), {"prompt": [6, 416]}, "prompt"),
    ("negative prompt ids", (COMPLETIONS,), {"prompt": [6, -1]}, "prompt.1"),
    ("1,000 stops", BOTH, {"stop": ["a"] * 1000}, "stop"),
    ("a stop of 1 MB", BOTH, {"stop": "a" * (1 << 20)}, "stop"),
    ("a stop of 1 MB in a list", BOTH, {"stop": ["b", "a" * (1 << 20)]}, "stop.1"),
    ("an empty stop", BOTH, {"stop": [""]}, "stop.0"),
    ("logit_bias out of vocabulary", BOTH, {"logit_bias": {"416": 1}}, "logit_bias"),
    ("logit_bias negative id", BOTH, {"logit_bias": {"-1": 1}}, "logit_bias"),
    ("logit_bias text", BOTH, {"logit_bias": {"x": 1}}, "logit_bias"),
    ("logit_bias long id", BOTH, {"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ("logit_bias other digits", BOTH, {"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ("logit_bias 100.5", BOTH, {"logit_bias": {"5": 100.5}}, "logit_bias.5"),
    ("stop_token_ids out of vocabulary", BOTH, {"stop_token_ids": [416], "min_tokens": 1}, "stop_token_ids"),
    ("stop_token_ids negative", BOTH, {"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ("129 stop_token_ids", BOTH, {"stop_token_ids": [6] * 129}, "stop_token_ids"),
    ("min above max tokens", BOTH, {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ("min_tokens above the context", BOTH, {"min_tokens": 8192, "max_tokens": 9000}, "min_tokens"),
    ("min_tokens -1", BOTH, {"min_tokens": -1}, "min_tokens"),
    ("max_tokens -1", BOTH, {"max_tokens": -1}, "max_tokens"),
    ("max_tokens 0", BOTH, {"max_tokens": 0}, "max_tokens"),
    ("temperature 2.01", BOTH, {"temperature": 2.01}, "temperature"),
    ("top_p 1.01", BOTH, {"top_p": 1.01}, "top_p"),
    ("top_k 2**31", BOTH, {"top_k": 2**31}, "top_k"),
    ("min_p -0.1", BOTH, {"min_p": -0.1}, "min_p"),
    ("repetition_penalty 0", BOTH, {"repetition_penalty": 0}, "repetition_penalty"),
    ("repetition_penalty of which logits overflow", BOTH, {"repetition_penalty": 1e-38}, "repetition_penalty"),
    ("presence_penalty 2.1", BOTH, {"presence_penalty": 2.1}, "presence_penalty"),
    ("bad_words", BOTH, {"bad_words": ["x"]}, "bad_words"),
    ("allowed_token_ids", BOTH, {"allowed_token_ids": [6]}, "allowed_token_ids"),
    ("truncate_prompt_tokens", BOTH, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ("prompt_logprobs", BOTH, {"prompt_logprobs": 0}, "prompt_logprobs"),
    ("beam search", BOTH, {"use_beam_search": True}, "use_beam_search"),
    ("a regex of another server's name", BOTH, {"regex": "a+"}, "regex"),
    ("a grammar of another server's name", BOTH, {"grammar": 'root ::= "a"'}, "grammar"),
    ("another layout of JSON", BOTH, {"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
    ("a chat template of the caller", (CHAT,), {"chat_template": "{{ messages }}"}, "chat_template"),
    ("documents", (CHAT,), {"documents": [{"text": "x"}]}, "documents"),
    ("an unknown format", BOTH, {"response_format": {"type": "yaml"}}, "response_format.type"),
    ("300 tools", (CHAT,), {"tools": [{"type": "function", "function": {"name": "f"}}] * 300}, "tools"),
    ("prompt above the context", (COMPLETIONS,), {"prompt": [6] * 8192}, "prompt"),
    ("a text above 8 characters per token", (COMPLETIONS,), {"prompt": "x" * (8 * 8192 + 1)}, "prompt"),
    ("a message of 1 MB", (CHAT,), {"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, "messages"),
]
REFUSED_CASES = [
    pytest.param(endpoint, fields, param, id=f"{name} {endpoint}")
    for name, endpoints, fields, param in REFUSED
    for endpoint in endpoints
]


@pytest.mark.parametrize(("endpoint", "fields", "param"), REFUSED_CASES)
@pytest.mark.acceptance("A24", "parameters out of range, online and as a batch line")
async def test_both_ways_refuse_with_the_same_words(
    server: Server, tmp_path: Path, endpoint: str, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({"model": MODEL_ID, **BASE[endpoint], **fields}).encode()
    online = await server.http.post(endpoint, content=body, headers={"content-type": "application/json"})
    assert (online.status_code, online.json()["error"]["param"]) == (400, param)
    report, (line,) = check_line(server, tmp_path, endpoint, body)
    assert report.errors == []
    assert line.result is not None
    assert (line.result.status_code, json.loads(line.result.body or "")) == (400, online.json())
    assert server.engine.requests == []


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"n": 128, "max_tokens": 1}),
    (CHAT, {"logprobs": True, "top_logprobs": 20, "max_tokens": 1}),
    (CHAT, {"stop": ["a" * 1024] * 4, "max_tokens": 1}),
    (CHAT, {"logit_bias": {"0": -100, "415": 100}, "max_tokens": 1}),
    (CHAT, {"max_tokens": 2**31 - 1, "ignore_eos": False}),
    (CHAT, {"seed": -(2**63), "max_tokens": 1}),
    (CHAT, {"bad_words": [], "use_beam_search": False, "structured_outputs": None, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [6] * 8191, "max_tokens": 100}),
    (COMPLETIONS, {"prompt": [6] * 8192, "max_tokens": 0, "echo": True}),
    (COMPLETIONS, {"best_of": 1, "n": 2, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": "a\0b", "max_tokens": 1}),
]


@pytest.mark.parametrize(("endpoint", "fields"), ACCEPTED)
@pytest.mark.acceptance("A24", "parameters at the last allowed value, online and as a batch line")
async def test_both_ways_accept_what_is_just_allowed(
    server: Server, tmp_path: Path, endpoint: str, fields: dict[str, Any]
) -> None:
    server.engine.script = [20]
    body = json.dumps({"model": MODEL_ID, **BASE[endpoint], **fields}).encode()
    online = await server.http.post(endpoint, content=body, headers={"content-type": "application/json"})
    assert online.status_code == 200, online.text
    report, (line,) = check_line(server, tmp_path, endpoint, body)
    assert (report.errors, line.result, report.num_rows) == ([], None, len(server.engine.requests))


# ---- JSON ------------------------------------------------------------------------------------------------

_HEAD = b'"model": "%s", "prompt": "x"' % MODEL_ID.encode()
NOT_PARSED: dict[str, tuple[bytes, str | None]] = {
    "NaN": (b'{%s, "temperature": NaN}', "temperature"),
    "Infinity": (b'{%s, "temperature": Infinity}', "temperature"),
    "minus infinity": (b'{%s, "min_p": -Infinity}', "min_p"),
    "1e400": (b'{%s, "temperature": 1e400}', "temperature"),
    "NaN in a field that is not read": (b'{%s, "metadata": {"a": [NaN]}}', "metadata.a.0"),
    "2**70": (b'{%s, "max_tokens": 1180591620717411303424}', "max_tokens"),
    "2**63": (b'{%s, "seed": 9223372036854775808}', "seed"),
    "5,000 digits": (b'{%s, "max_tokens": ' + b"9" * 5000 + b"}", "max_tokens"),
    "lone surrogate in the prompt": (b'{"model": "m", "prompt": "\\ud800"}', "prompt"),
    "lone surrogate in a list": (b'{"model": "m", "prompt": ["\\ud800"]}', "prompt.0"),
    "lone surrogate in an object": (b'{"model": "m", "prompt": {"a": "\\ud800"}}', "prompt.a"),
    "lone surrogate in a key": (b'{%s, "\\udfff": 1}', None),
    "duplicate keys": (b'{%s, "n": 1, "n": 2}', "n"),
    "duplicate keys of an inner object": (b'{%s, "metadata": {"a": 1, "a": 1}}', "a"),
    "100,000 levels": (b'{%s, "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "200 levels": (b'{%s, "metadata": ' + b"[" * 200 + b"]" * 200 + b"}", None),
    "invalid UTF-8": (b'{%s, "user": "\xff"}', None),
    "cut off": (b"{%s", None),
}
PARSED: dict[str, tuple[bytes, str]] = {
    "true as an integer": (b'{%s, "max_tokens": true}', "max_tokens"),
    "false as a number": (b'{%s, "temperature": false}', "temperature"),
    "1.0 as an integer": (b'{%s, "n": 1.0}', "n"),
    "a number as text": (b'{%s, "n": "1"}', "n"),
    "1 as a boolean": (b'{%s, "echo": 1}', "echo"),
    "an object as the prompt": (b'{"model": "%m", "prompt": {}}', "prompt"),
    "mixed prompts": (b'{"model": "%m", "prompt": ["a", 1]}', "prompt.1"),
    "a boolean among token ids": (b'{"model": "%m", "prompt": [true]}', "prompt.0"),
}


async def _post(server: Server, raw: bytes) -> tuple[int, dict[str, Any]]:
    reply = await server.http.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    return reply.status_code, reply.json()


async def _canary(server: Server) -> tuple[int, Any]:
    status, body = await _post(server, b'{"prompt": "canary", "temperature": 0, "max_tokens": 8}')
    return status, body["choices"]


@pytest.mark.parametrize("name", NOT_PARSED)
@pytest.mark.acceptance("A23", "JSON that is not parsed: 400 online, a failed line in a batch")
async def test_json_that_no_parser_of_ours_takes(server: Server, tmp_path: Path, name: str) -> None:
    raw, param = NOT_PARSED[name]
    raw = raw.replace(b"%s", _HEAD)
    before = await _canary(server)
    status, body = await _post(server, raw)
    assert (status, body["error"]["param"]) == (400, param)
    report, kept = check_line(server, tmp_path, COMPLETIONS, raw)
    assert [error["code"] for error in report.errors] == ["invalid_json_line"]
    assert kept == []
    assert await _canary(server) == before


@pytest.mark.parametrize("name", PARSED)
@pytest.mark.acceptance("A23", "JSON of the wrong type: the same 400 online and in a batch line")
async def test_json_of_the_wrong_type(server: Server, tmp_path: Path, name: str) -> None:
    raw, param = PARSED[name]
    raw = raw.replace(b"%s", _HEAD).replace(b"%m", MODEL_ID.encode())
    before = await _canary(server)
    status, body = await _post(server, raw)
    assert (status, body["error"]["param"]) == (400, param)
    report, (line,) = check_line(server, tmp_path, COMPLETIONS, raw)
    assert report.errors == []
    assert line.result is not None
    assert (line.result.status_code, json.loads(line.result.body or "")) == (400, body)
    assert await _canary(server) == before


@pytest.mark.parametrize(("raw", "status"), [(b"", 400), (b"[{}]", 400), (b'"x"', 400), (b" " * 21_000_000, 413)])
@pytest.mark.acceptance("A23", "bodies that are empty, no object, or of 21 MB")
async def test_bodies_that_are_no_object(server: Server, raw: bytes, status: int) -> None:
    before = await _canary(server)
    found, body = await _post(server, raw)
    assert (found, set(body["error"])) == (status, {"message", "type", "param", "code"})
    assert await _canary(server) == before


async def test_processing_time_is_told_in_a_header(server: Server) -> None:
    reply = await server.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
    assert 0 <= int(reply.headers["openai-processing-ms"]) < 60_000

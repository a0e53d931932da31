"""Conversations as real clients send them: continued, unclean, with every kind of template."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from neaptide.server.http.errors import InvalidRequestError
from neaptide.server.openai.endpoints import CHAT
from neaptide.server.openai.prepare import prepare
from neaptide.server.text.chat_template import ChatTemplate, TemplateInput
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_DIR, Server, make_context
from tests.server.text.made import made_tokenizer, write_tokenizer

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TRIMMED = "{% for m in messages %}<|{{ m.role }}|> {{ m.content | trim }} <|end|>{% endfor %}"
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% set c = m.content %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{% endif %}"
    "{{ c }}<|end|>{% endfor %}"
)
QUESTION = {"role": "user", "content": "count end"}


def said(tokenizer: Tokenizer, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The prompt's text for the messages of a request."""
    body = {"messages": messages, "max_tokens": 1, **fields}
    (prompt,) = prepare(CHAT, body, make_context(tokenizer)).prompts
    return tokenizer.decode(prompt)


# ---- B1: the last message goes on ---------------------------------------------------------------------------


@pytest.mark.parametrize("template", [PLAIN, TRIMMED, THINKING])
def test_the_prompt_ends_with_the_last_message_as_in_transformers(template: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template)
    ours, reference = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for last in ("end", "e", "n", "d|>", "one two ", " one\n", "", "<think>", "<|assistant|"):
        messages = [QUESTION, {"role": "assistant", "content": last}]
        expected = reference.apply_chat_template(messages, continue_final_message=True, tokenize=False)
        assert said(ours, messages, continue_final_message=True) == expected, last


async def test_tokenize_ends_with_the_last_message_too(server: Server, tmp_path: Path) -> None:
    server.context.tokenizer = ours = made_tokenizer(tmp_path, PLAIN)
    for last in ("end", "d|>"):
        body: dict[str, Any] = {"messages": [QUESTION, {"role": "assistant", "content": last}]}
        body |= {"continue_final_message": True, "add_generation_prompt": False}
        tokens = (await server.http.post("/tokenize", json=body)).json()["tokens"]
        assert ours.decode(tokens) == f"<|user|>count end<|end|><|assistant|>{last}"


def test_reasoning_goes_on(tmp_path: Path) -> None:
    ours = made_tokenizer(tmp_path, THINKING)
    messages = [QUESTION, {"role": "assistant", "content": "", "reasoning": "Hm, e"}]
    text = said(ours, messages, continue_final_message="reasoning_content")
    assert text.endswith("<|assistant|><think>Hm, e")


@pytest.mark.parametrize("last", [{"content": None, "reasoning": "x"}, {"content": "Hm.</think>yes"}])
def test_what_no_template_shows_cannot_go_on(last: dict[str, Any], tmp_path: Path) -> None:
    ours = made_tokenizer(tmp_path, THINKING)
    with pytest.raises(InvalidRequestError) as caught:
        said(ours, [QUESTION, {"role": "assistant", **last}], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


# ---- histories ----------------------------------------------------------------------------------------------

CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}{{ tools | tojson if tools }}"
)


def called(arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a": 1}'),
        *((bad, "{}") for bad in ('{"a": ', "[1]", '"x"', "null", '{"a": NaN}', '{"a": "\\ud800"}', "", "f(x)", "1")),
    ],
)
def test_arguments_that_a_model_wrote_are_never_refused(written: Any, shown: str, tmp_path: Path) -> None:
    text = said(made_tokenizer(tmp_path, CALLS), [QUESTION, called(written)])
    assert text.endswith(f"<|assistant|>(call_1 f {shown})")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_seen_under_every_name(name: str, read: str, tmp_path: Path) -> None:
    ours = made_tokenizer(tmp_path, PLAIN.replace("m.content", f"m.{read} or m.content"))
    text = said(ours, [QUESTION, {"role": "assistant", name: "Hm."}, QUESTION])
    assert "<|assistant|>Hm.<|end|>" in text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": [{"type": "output_text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": ["a", {"type": "thinking", "thinking": "Hm."}]}, "a"),
        ({"content": []}, ""),
        ({"content": None}, ""),
        ({}, ""),
    ],
)
def test_turns_of_a_model_come_in_many_forms(message: dict[str, Any], shown: str, tmp_path: Path) -> None:
    template = PLAIN.replace("{{ m.content", "{{ m.content.strip()")
    text = said(made_tokenizer(tmp_path, template), [QUESTION, {"role": "assistant", **message}])
    assert text.endswith(f"<|assistant|>{shown}<|end|>")


def test_parts_are_left_to_templates_that_read_them(tmp_path: Path) -> None:
    template = PLAIN.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text or p }}{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "tool", "tool_call_id": "c", "content": parts}]
    assert said(made_tokenizer(tmp_path, template), messages) == "<|user|>ab<|end|><|tool|>a\nb<|end|>"


def test_calls_before_there_were_tool_calls(tmp_path: Path) -> None:
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "5"},
    ]
    assert said(made_tokenizer(tmp_path, CALLS), messages).endswith("<|assistant|>( f {})<|tool|>5")


def test_ids_are_as_the_template_wants_them(tmp_path: Path) -> None:
    """Mistral's templates refuse other ids than nine letters or digits."""
    wanted = "{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}{{ raise_exception('id') }}{% endif %}"
    ours = made_tokenizer(tmp_path, CALLS.replace("{% for c in m.tool_calls or [] %}", wanted))
    foreign, short = "call_0123456789abcdef", "abcdefghi"
    for call_id, shown in ((foreign, "789abcdef"), (short, short), ("x", "000000000")):
        result = {"role": "tool", "tool_call_id": call_id, "content": "5"}
        text = said(ours, [QUESTION, called("{}", call_id), result])
        assert text.endswith(f"({shown} f {{}})<|tool|>5{shown}")


def test_arguments_are_text_for_templates_that_join_them(tmp_path: Path) -> None:
    ours = made_tokenizer(tmp_path, CALLS.replace("c.function.arguments | tojson", "'```' + c.function.arguments"))
    assert said(ours, [QUESTION, called('{"a":1}')]).endswith('(call_1 f ```{"a": 1})')


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (PLAIN, "<|system|>a\n\nb<|end|><|user|>count end<|end|>"),
        (PLAIN + "{{ 'developer' }}", "<|system|>a<|end|><|user|>count end<|end|><|developer|>b<|end|>developer"),
    ],
)
def test_developers_are_the_system_where_the_template_knows_no_other(template: str, shown: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "a"}, QUESTION, {"role": "developer", "content": "b"}]
    assert said(made_tokenizer(tmp_path, template), messages) == shown


# ---- templates ----------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = [
    {"name": "default", "template": "plain{{ messages[0].content }}"},
    {"name": "tool_use", "template": "with{{ tools | length }}"},
    {"name": "rag", "template": "rag"},
]


def _named_in_files(directory: Path) -> Tokenizer:
    write_tokenizer(directory, "unread")
    (directory / "additional_chat_templates").mkdir()
    for entry in NAMED:
        is_default = entry["name"] == "default"
        file = "chat_template.jinja" if is_default else f"additional_chat_templates/{entry['name']}.jinja"
        (directory / file).write_text(entry["template"])
    return Tokenizer(directory)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_model_may_have_several_templates(in_files: bool, tmp_path: Path) -> None:
    ours = _named_in_files(tmp_path) if in_files else made_tokenizer(tmp_path, NAMED)
    assert said(ours, [QUESTION]) == "plaincount end"
    assert said(ours, [QUESTION], tools=[TOOL]) == "with1"
    assert said(ours, [QUESTION], tools=[TOOL], tool_choice="none") == "plaincount end"
    assert said(ours, [QUESTION], chat_template="rag") == "rag"
    assert ours.info()["chat_template"] == NAMED[0]["template"]


def test_several_templates_without_a_default_need_a_name(tmp_path: Path) -> None:
    ours = made_tokenizer(tmp_path, NAMED[1:])
    assert said(ours, [QUESTION], tools=[TOOL]) == "with1"
    with pytest.raises(InvalidRequestError, match="no default"):
        said(ours, [QUESTION])


def test_variables_are_json_of_any_kind(tmp_path: Path) -> None:
    ours = made_tokenizer(tmp_path, "{{ a | tojson }} {{ b.c[0].d }} {{ e is none }}")
    kwargs = {"a": [1, "x", {"y": [None]}], "b": {"c": [{"d": 2.5}]}, "e": None}
    text = said(ours, [QUESTION], chat_template_kwargs=kwargs)
    assert text == '[1, "x", {"y": [null]}] 2.5 True'


async def test_tools_that_no_template_shows_are_refused(server: Server, tmp_path: Path) -> None:
    server.context.tokenizer = made_tokenizer(tmp_path, PLAIN)
    for choice in ("auto", "required", None):
        body = {"messages": [QUESTION], "tools": [TOOL], "tool_choice": choice}
        reply = await server.http.post(CHAT, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
    body = {"messages": [QUESTION], "tools": [TOOL], "tool_choice": "none", "max_tokens": 1}
    assert (await server.http.post(CHAT, json=body)).status_code == 200


async def test_no_tools_are_no_tools(server: Server, tmp_path: Path) -> None:
    """Agents send an empty list, and the default choice, when they have none."""
    server.context.tokenizer = made_tokenizer(tmp_path, PLAIN)
    plain = {"messages": [QUESTION], "max_tokens": 1}
    for fields in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}):
        assert (await server.http.post(CHAT, json=plain | fields)).status_code == 200
    first, *others = [request.prompt_token_ids for request in server.engine.requests]
    assert others == [first] * 3


@pytest.mark.parametrize(
    "source", ["{% set n = namespace(_a=1) %}", "{% set n = namespace() %}{% set n._a = 1 %}", "{{ dict.__class__.x }}"]
)
def test_helpers_reach_nothing_inside(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source, {}).render(TemplateInput(messages=[QUESTION]))


def test_templates_may_use_the_helpers_of_transformers() -> None:
    source = "{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}{{ dict(b=3).b }}"
    assert ChatTemplate(source, {}).render(TemplateInput(messages=[QUESTION])) == "23"


def test_a_template_of_a_processor_is_read(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "Hi"}])) == "Hi!"

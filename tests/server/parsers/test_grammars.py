"""Grammars let a model think first: reasoning is free, and what follows it is constrained."""

import json
from typing import Any

import pytest

from neaptide.server.openai.prepare import Prepared, prepare
from neaptide.server.parsers.choose import choose_parsers
from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_ID, USER, Server, make_context
from tests.server.structured.test_schemas import accepts

FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [4]}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}, "additionalProperties": False},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PLAIN_CALL = '{"name": "add", "arguments": {"a": 1}}'


def prepared(tokenizer: Tokenizer, *, tools: str = "hermes", reasoning: str = "qwen3", **body: Any) -> Prepared:
    context = make_context(tokenizer)
    context.parsers = choose_parsers(tools, reasoning, None, ())
    return prepare("/v1/chat/completions", {"model": MODEL_ID, "messages": USER, **body}, context)


def grammar_of(found: Prepared) -> str:
    assert found.constraint is not None
    return found.constraint.grammar


def opened(end: str) -> dict[str, Any]:
    """A request whose prompt ends as templates end it that open or close reasoning."""
    messages = [*USER, {"role": "assistant", "content": end}]
    return {"messages": messages, "continue_final_message": True}


def test_a_model_may_think_before_its_answer(tokenizer: Tokenizer) -> None:
    grammar = grammar_of(prepared(tokenizer, response_format=FORMAT))
    assert accepts(grammar, "4")
    assert accepts(grammar, '<think>\nIs it {"a": 5}? No.\n</think>\n\n4')
    for text in ("5", "<think>4", "<think>4</think>5", "4</think>4", "hm</think>4"):
        assert not accepts(grammar, text)


def test_a_model_whose_prompt_opened_reasoning_thinks_first(tokenizer: Tokenizer) -> None:
    grammar = grammar_of(prepared(tokenizer, response_format=FORMAT, **opened("<think>\n")))
    assert accepts(grammar, "Is it 5? No.\n</think>\n\n4")
    assert not accepts(grammar, "4")
    assert not accepts(grammar, "hm</think>\n5")


def test_a_model_whose_prompt_closed_reasoning_answers_at_once(tokenizer: Tokenizer) -> None:
    found = prepared(tokenizer, response_format=FORMAT, **opened("<think>\n\n</think>"))
    assert accepts(grammar_of(found), "4")
    assert not accepts(grammar_of(found), "<think>hm</think>4")
    assert found.constraint is not None
    assert found.constraint.max_bytes is not None


def test_thinking_is_not_bounded_by_the_answers_length(tokenizer: Tokenizer) -> None:
    short = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    thinking = prepared(tokenizer, response_format=short, max_tokens=500)
    assert thinking.max_tokens == [500]
    assert prepared(tokenizer, reasoning="none", response_format=short, max_tokens=500).max_tokens[0] < 20


def test_a_forced_call_comes_after_reasoning(tokenizer: Tokenizer) -> None:
    grammar = grammar_of(_forced(tokenizer))
    assert accepts(grammar, CALL)
    assert accepts(grammar, f"<think>I could say {PLAIN_CALL}.</think>\n{CALL}")
    assert not accepts(grammar, f"<think>I could say {PLAIN_CALL}.</think>\nNo.")
    assert not accepts(grammar, f"<think>{CALL}")


def _forced(tokenizer: Tokenizer, parser: str = "hermes") -> Prepared:
    context = make_context(tokenizer)
    context.parsers = choose_parsers(parser, "qwen3", None, ())
    body = {"model": MODEL_ID, "messages": USER, "tools": [TOOL], "tool_choice": "required"}
    return prepare("/v1/chat/completions", body, context)


@pytest.mark.parametrize("parser", ["kimi_k2", "deepseek_v3", "openai"])
async def test_forced_calls_of_formats_without_a_grammar_are_plain_json(server: Server, parser: str) -> None:
    assert accepts(grammar_of(_forced(server.context.tokenizer, parser)), PLAIN_CALL)
    server.context.parsers = choose_parsers(parser, "qwen3", None, ())
    server.engine.script = server.context.tokenizer.encode(f"<think>hm</think>\n{PLAIN_CALL}")
    body = {"messages": USER, "tools": [TOOL], "tool_choice": "required"}
    message = (await server.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "hm")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}

"""``langchain-openai``: chat models and plain completions."""

import json

import pytest

from tests.clients.conversation import seen
from tests.clients.environment import ClientEnvironment
from tests.e2e.server import RunningServer

LANGCHAIN = ClientEnvironment("langchain")
ANSWER = "1+4=5, 2+3=5 so 55"
pytestmark = LANGCHAIN.marks


def test_invoke_answers_with_usage(server: RunningServer) -> None:
    seen = LANGCHAIN.drive("invoke", server.base_url)
    assert seen["text"] == ANSWER
    assert seen["finish_reason"] == "stop"
    assert seen["usage"]["total_tokens"] == seen["usage"]["input_tokens"] + seen["usage"]["output_tokens"] > 0


def test_stream_arrives_in_pieces_and_ends_with_usage(server: RunningServer) -> None:
    seen = LANGCHAIN.drive("stream", server.base_url)
    pieces = [text for text in seen["texts"] if text]
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 2
    (usage,) = seen["usages"]
    assert usage["output_tokens"] >= len(pieces)


def test_structured_output_by_every_method(server: RunningServer) -> None:
    seen = LANGCHAIN.drive("structured_output", server.base_url)
    assert seen["json_schema"]["side"] in ("left", "right")
    assert seen["function_calling"]["side"] in ("left", "right")
    assert json.loads(seen["json_mode"])["answer"] == 55


@pytest.mark.parametrize("scenario", ["two_turns", "two_turns_responses"])
def test_a_tool_is_called_and_the_conversation_goes_on(server: RunningServer, scenario: str) -> None:
    called = {"name": "get_weather", "arguments": {"city": "paris"}}
    assert LANGCHAIN.drive(scenario, server.base_url) == called | {"text": "The answer is sunny."}


def test_the_responses_api(server: RunningServer) -> None:
    assert LANGCHAIN.drive("responses", server.base_url) == {"text": ANSWER}


def test_flex_is_told_back(server: RunningServer) -> None:
    assert LANGCHAIN.drive("flex", server.base_url) == {"text": ANSWER, "service_tier": "flex"}


@pytest.mark.parametrize("scenario", ["completion", "completion_stream"])
def test_plain_completions(server: RunningServer, scenario: str) -> None:
    assert LANGCHAIN.drive(scenario, server.base_url) == {"text": ANSWER}


# ---- agents of LangGraph ---------------------------------------------------------------------------------


def test_two_turns_of_an_agent_with_a_tool_and_reasoning(scripted: RunningServer) -> None:
    assert LANGCHAIN.drive("conversation", scripted.base_url) == seen(remembers=True)


def test_two_turns_of_a_streaming_agent_with_a_tool_and_reasoning(scripted: RunningServer) -> None:
    """The client drops the events of reasoning, but takes the sealed form from the item's end and sends it back."""
    assert LANGCHAIN.drive("conversation_stream", scripted.base_url) == seen(remembers=True, shows_thoughts=False)


@pytest.mark.parametrize("scenario", ["conversation_chat", "conversation_chat_stream"])
def test_two_turns_of_an_agent_with_chats(scripted: RunningServer, scenario: str) -> None:
    """The client drops the reasoning of streamed chats."""
    assert LANGCHAIN.drive(scenario, scripted.base_url) == seen(remembers=False, shows_thoughts=False)

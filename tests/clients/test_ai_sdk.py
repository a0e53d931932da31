"""Vercel's ``ai``, whose OpenAI provider asks ``/v1/responses`` by default."""

import pytest

from tests.clients.conversation import seen
from tests.clients.environment import NodeEnvironment
from tests.e2e.server import RunningServer

AI_SDK = NodeEnvironment("ai-sdk")
ANSWER = "1+4=5, 2+3=5 so 55"
pytestmark = AI_SDK.marks


def test_text_whole_and_streamed(server: RunningServer) -> None:
    assert AI_SDK.drive("text", server.base_url) == {"text": ANSWER}
    pieces = AI_SDK.drive("stream", server.base_url)["texts"]
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 2


@pytest.mark.parametrize("scenario", ["object", "object_chat"])
def test_generate_object_is_of_the_schema(server: RunningServer, scenario: str) -> None:
    seen = AI_SDK.drive(scenario, server.base_url)
    assert seen["side"] in ("left", "right")
    assert 0 <= seen["steps"] <= 9


@pytest.mark.parametrize("scenario", ["two_turns", "two_turns_chat"])
def test_a_tool_is_called_and_the_conversation_goes_on(server: RunningServer, scenario: str) -> None:
    seen = AI_SDK.drive(scenario, server.base_url)
    assert seen["asked"][0] in ("paris", "rome")
    assert (seen["steps"], bool(seen["text"])) == (2, True)


@pytest.mark.parametrize("scenario", ["conversation", "conversation_stream"])
def test_two_turns_with_a_tool_and_reasoning(scripted: RunningServer, scenario: str) -> None:
    """The SDK shows only summaries of a response's reasoning, and sends back the sealed form."""
    assert AI_SDK.drive(scenario, scripted.base_url) == seen(remembers=True, shows_thoughts=False)


@pytest.mark.parametrize("scenario", ["conversation_chat", "conversation_chat_stream"])
def test_the_same_with_its_provider_for_servers_like_ours(scripted: RunningServer, scenario: str) -> None:
    assert AI_SDK.drive(scenario, scripted.base_url) == seen(remembers=True)

"""``llama-index`` with its class for servers like ours."""

import pytest

from tests.clients.conversation import seen
from tests.clients.environment import ClientEnvironment
from tests.e2e.server import RunningServer

LLAMA_INDEX = ClientEnvironment("llama-index")
ANSWER = "1+4=5, 2+3=5 so 55"
pytestmark = LLAMA_INDEX.marks


def test_chat_whole_and_streamed(server: RunningServer) -> None:
    assert LLAMA_INDEX.drive("chat", server.base_url) == {"text": ANSWER}
    assert "".join(LLAMA_INDEX.drive("stream", server.base_url)["texts"]) == ANSWER


def test_structured_output_is_an_object_of_the_class(server: RunningServer) -> None:
    assert LLAMA_INDEX.drive("structured", server.base_url)["side"] in ("left", "right")


def test_a_call_of_a_tool(server: RunningServer) -> None:
    seen = LLAMA_INDEX.drive("tools", server.base_url)
    assert seen["name"] == "Side"
    assert seen["arguments"]["side"] in ("left", "right")


def test_a_tool_is_called_and_the_conversation_goes_on(server: RunningServer) -> None:
    called = {"name": "get_weather", "arguments": {"city": "paris"}}
    assert LLAMA_INDEX.drive("two_turns", server.base_url) == called | {"text": "The answer is sunny."}


@pytest.mark.parametrize("scenario", ["conversation", "conversation_stream"])
def test_two_turns_of_an_agent_with_a_tool_and_reasoning(scripted: RunningServer, scenario: str) -> None:
    """The SDK shows reasoning and does not send it back."""
    assert LLAMA_INDEX.drive(scenario, scripted.base_url) == seen(remembers=False)

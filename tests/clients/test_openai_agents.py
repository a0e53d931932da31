"""``openai-agents`` with its default model, which asks ``/v1/responses``."""

import pytest

from tests.clients.conversation import seen
from tests.clients.environment import ClientEnvironment
from tests.e2e.server import RunningServer

AGENTS = ClientEnvironment("openai-agents")
pytestmark = AGENTS.marks


@pytest.mark.parametrize("scenario", ["text", "instructed"])
def test_an_agent_answers(server: RunningServer, scenario: str) -> None:
    assert AGENTS.drive(scenario, server.base_url) == {"text": "1+4=5, 2+3=5 so 55"}


def test_an_output_type_is_an_object_of_the_class(server: RunningServer) -> None:
    assert AGENTS.drive("output_type", server.base_url)["side"] in ("left", "right")


def test_a_tool_is_called_and_the_conversation_goes_on(server: RunningServer) -> None:
    assert AGENTS.drive("two_turns", server.base_url) == {"asked": ["paris"], "text": "The answer is sunny."}


@pytest.mark.parametrize("scenario", ["conversation", "conversation_stream"])
def test_two_turns_with_a_tool_and_reasoning(scripted: RunningServer, scenario: str) -> None:
    assert AGENTS.drive(scenario, scripted.base_url) == seen(remembers=True)


@pytest.mark.parametrize("scenario", ["conversation_chat", "conversation_chat_stream"])
def test_the_same_with_chats(scripted: RunningServer, scenario: str) -> None:
    """With its model of chats the SDK drops reasoning from the history."""
    assert AGENTS.drive(scenario, scripted.base_url) == seen(remembers=False)

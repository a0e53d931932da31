"""``pydantic-ai``: outputs by a forced call, which is its default, and by a schema."""

import pytest

from tests.clients.conversation import seen
from tests.clients.environment import ClientEnvironment
from tests.e2e.server import RunningServer

PYDANTIC_AI = ClientEnvironment("pydantic-ai")
pytestmark = PYDANTIC_AI.marks


@pytest.mark.parametrize("scenario", ["default_output", "responses_output", "native_output"])
def test_an_output_is_an_object_of_the_class(server: RunningServer, scenario: str) -> None:
    seen = PYDANTIC_AI.drive(scenario, server.base_url)
    assert seen["side"] in ("left", "right")
    assert 0 <= seen["steps"] <= 9


@pytest.mark.parametrize("scenario", ["two_turns", "two_turns_responses"])
def test_a_tool_is_called_and_the_conversation_goes_on(server: RunningServer, scenario: str) -> None:
    """Nothing forces the call: the embedded model has learned to."""
    assert PYDANTIC_AI.drive(scenario, server.base_url) == {"asked": ["paris"], "text": "The answer is sunny."}


@pytest.mark.parametrize(
    "scenario", ["conversation", "conversation_stream", "conversation_chat", "conversation_chat_stream"]
)
def test_two_turns_with_a_tool_and_reasoning(scripted: RunningServer, scenario: str) -> None:
    assert PYDANTIC_AI.drive(scenario, scripted.base_url) == seen(remembers=True)

"""Runs in the environment of ``pydantic-ai``: one scenario a run; what it saw is printed as JSON."""

import asyncio
import json
import sys
from collections.abc import AsyncIterable, Callable
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from recording import FIRST, SECOND, WEATHER, Recorder, said_in

MODEL = "neaptide-tiny"
PROVIDER = OpenAIProvider(base_url=sys.argv[2], api_key="none")
CHAT = OpenAIChatModel(MODEL, provider=PROVIDER)
SETTINGS: Any = {"temperature": 0, "max_tokens": 300}


class Side(BaseModel, extra="forbid"):
    side: Literal["left", "right"]
    steps: int = Field(ge=0, le=9)


def default_output() -> dict[str, Any]:
    return Agent(CHAT, output_type=Side, model_settings=SETTINGS).run_sync("Which side?").output.model_dump()


def responses_output() -> dict[str, Any]:
    model = OpenAIResponsesModel(MODEL, provider=PROVIDER)
    return Agent(model, output_type=Side, model_settings=SETTINGS).run_sync("Which side?").output.model_dump()


def native_output() -> dict[str, Any]:
    agent = Agent(CHAT, output_type=NativeOutput(Side), model_settings=SETTINGS)
    return agent.run_sync("Which side?").output.model_dump()


def _two_turns(model: Any) -> dict[str, Any]:
    asked: list[str] = []
    agent = Agent(model, model_settings=SETTINGS)

    @agent.tool_plain
    def get_weather(city: Literal["paris", "rome"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    return {"text": agent.run_sync("What is the weather in paris?").output, "asked": asked}


def two_turns() -> dict[str, Any]:
    return _two_turns(CHAT)


def two_turns_responses() -> dict[str, Any]:
    return _two_turns(OpenAIResponsesModel(MODEL, provider=PROVIDER))


async def _drain(context: Any, events: AsyncIterable[Any]) -> None:
    async for _ in events:
        pass


def _thought(part: ThinkingPart) -> str:
    """The text of a thought, which the Responses API has as raw content."""
    return part.content or "".join((part.provider_details or {}).get("raw_content", []))


async def _conversation(is_chat: bool, is_streamed: bool) -> dict[str, Any]:
    recorder = Recorder()
    cities: list[str] = []
    provider = OpenAIProvider(base_url=sys.argv[2], api_key="none", http_client=recorder.async_client())
    agent = Agent((OpenAIChatModel if is_chat else OpenAIResponsesModel)(MODEL, provider=provider))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return WEATHER[city]

    answers: list[str] = []
    said: list[Any] = []
    for question in (FIRST, SECOND):
        # With a handler of events the requests are streamed.
        handler = _drain if is_streamed else None
        result = await agent.run(question, message_history=said, event_stream_handler=handler)
        answers.append(result.output)
        said = result.all_messages()
    thoughts = [_thought(part) for message in said for part in message.parts if isinstance(part, ThinkingPart)]
    batch = said_in(recorder.last_as_batch(sys.argv[2]))
    return {"answers": answers, "cities": cities, "thoughts": thoughts, "batch": batch}


def conversation() -> dict[str, Any]:
    return asyncio.run(_conversation(is_chat=False, is_streamed=False))


def conversation_stream() -> dict[str, Any]:
    return asyncio.run(_conversation(is_chat=False, is_streamed=True))


def conversation_chat() -> dict[str, Any]:
    return asyncio.run(_conversation(is_chat=True, is_streamed=False))


def conversation_chat_stream() -> dict[str, Any]:
    return asyncio.run(_conversation(is_chat=True, is_streamed=True))


SCENARIOS: list[Callable[[], dict[str, Any]]] = [
    default_output,
    responses_output,
    native_output,
    two_turns,
    two_turns_responses,
    conversation,
    conversation_stream,
    conversation_chat,
    conversation_chat_stream,
]

if __name__ == "__main__":
    print(json.dumps({scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]]()))

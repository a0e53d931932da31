"""Runs in the environment of ``openai-agents``: one scenario a run; what it saw is printed as JSON."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from recording import FIRST, SECOND, WEATHER, Recorder, said_in

MODEL = "neaptide-tiny"  # a name is all that is given, so it is asked by the client's default API
SETTINGS = ModelSettings(temperature=0, max_tokens=200)
ASKED: list[str] = []


class Side(BaseModel):
    side: Literal["left", "right"]


@function_tool
def get_weather(city: Literal["paris", "rome"]) -> str:
    """The weather of a city."""
    ASKED.append(city)
    return "sunny"


def _run(question: str, settings: ModelSettings = SETTINGS, **more: Any) -> Any:
    agent = Agent(name="helper", model=MODEL, model_settings=settings, **more)
    return Runner.run_sync(agent, question).final_output


def text() -> dict[str, Any]:
    return {"text": _run("What is 21 + 34?")}


def instructed() -> dict[str, Any]:
    return {"text": _run("What is 21 + 34?", instructions="Answer the question.")}


def output_type() -> dict[str, Any]:
    made: Side = _run("Which side?", output_type=Side)
    return made.model_dump()


def two_turns() -> dict[str, Any]:
    forced = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    # The client forces the first turn only.
    return {"text": _run("What is the weather in paris?", forced, tools=[get_weather]), "asked": ASKED}


@function_tool(name_override="get_weather")
def weather_of(city: str) -> str:
    """The weather of a city."""
    ASKED.append(city)
    return WEATHER[city]


async def _answer(agent: Agent, said: list[Any], is_streamed: bool) -> Any:
    if not is_streamed:
        return await Runner.run(agent, said)
    result = Runner.run_streamed(agent, said)
    async for _ in result.stream_events():
        pass
    return result


def _thoughts(result: Any) -> list[str]:
    items = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    return ["".join(part.text for part in item.content or item.summary) for item in items]


async def _conversation(is_chat: bool, is_streamed: bool) -> dict[str, Any]:
    recorder = Recorder()
    client = AsyncOpenAI(base_url=sys.argv[2], api_key="none", max_retries=0, http_client=recorder.async_client())
    set_default_openai_client(client, use_for_tracing=False)
    model = OpenAIChatCompletionsModel(MODEL, client) if is_chat else MODEL
    agent = Agent(name="helper", model=model, tools=[weather_of])
    seen: dict[str, Any] = {"answers": [], "cities": ASKED, "thoughts": []}
    said: list[Any] = []
    for question in (FIRST, SECOND):
        result = await _answer(agent, [*said, {"role": "user", "content": question}], is_streamed)
        said = result.to_input_list()
        seen["answers"].append(result.final_output)
        seen["thoughts"] += _thoughts(result)
    return seen | {"batch": said_in(recorder.last_as_batch(sys.argv[2]))}


def conversation() -> dict[str, Any]:
    return asyncio.run(_conversation(is_chat=False, is_streamed=False))


def conversation_stream() -> dict[str, Any]:
    return asyncio.run(_conversation(is_chat=False, is_streamed=True))


def conversation_chat() -> dict[str, Any]:
    return asyncio.run(_conversation(is_chat=True, is_streamed=False))


def conversation_chat_stream() -> dict[str, Any]:
    return asyncio.run(_conversation(is_chat=True, is_streamed=True))


SCENARIOS: list[Callable[[], dict[str, Any]]] = [
    text,
    instructed,
    output_type,
    two_turns,
    conversation,
    conversation_stream,
    conversation_chat,
    conversation_chat_stream,
]

if __name__ == "__main__":
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=sys.argv[2], api_key="none", max_retries=0), use_for_tracing=False)
    print(json.dumps({scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]]()))

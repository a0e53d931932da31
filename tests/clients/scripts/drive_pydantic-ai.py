"""Runs in the environment of ``pydantic-ai``: one scenario a run; what it saw is printed as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

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


SCENARIOS: list[Callable[[], dict[str, Any]]] = [
    default_output,
    responses_output,
    native_output,
    two_turns,
    two_turns_responses,
]

if __name__ == "__main__":
    print(json.dumps({scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]]()))

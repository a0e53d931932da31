"""Runs in the environment of ``openai-agents``: one scenario a run; what it saw is printed as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

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


SCENARIOS: list[Callable[[], dict[str, Any]]] = [text, instructed, output_type, two_turns]

if __name__ == "__main__":
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=sys.argv[2], api_key="none", max_retries=0), use_for_tracing=False)
    print(json.dumps({scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]]()))

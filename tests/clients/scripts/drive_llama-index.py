"""Runs in the environment of ``llama-index``: one scenario a run; what it saw is printed as JSON."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from llama_index.core.agent.workflow import AgentOutput, FunctionAgent
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.program.function_program import get_function_tool
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from recording import FIRST, SECOND, WEATHER, Recorder, said_in

LLM = OpenAILike(
    model="neaptide-tiny",
    api_base=sys.argv[2],
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    temperature=0,
    max_tokens=300,
    max_retries=0,
)
QUESTION = "What is 21 + 34?"


class Side(BaseModel, extra="forbid"):
    """A side."""

    side: Literal["left", "right"]


def chat() -> dict[str, Any]:
    return {"text": LLM.chat([ChatMessage(role="user", content=QUESTION)]).message.content}


def stream() -> dict[str, Any]:
    return {"texts": [piece.delta for piece in LLM.stream_chat([ChatMessage(role="user", content=QUESTION)])]}


def structured() -> dict[str, Any]:
    reply = LLM.as_structured_llm(Side).chat([ChatMessage(role="user", content=QUESTION)])
    made: Side = reply.raw
    return made.model_dump()


def tools() -> dict[str, Any]:
    tool = get_function_tool(Side)
    reply = LLM.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = LLM.get_tool_calls_from_response(reply)
    return {"name": call.tool_name, "arguments": call.tool_kwargs}


def get_weather(city: Literal["paris", "rome"]) -> str:
    """The weather of a city."""
    return "sunny"


def two_turns() -> dict[str, Any]:
    tool = FunctionTool.from_defaults(get_weather)
    question = ChatMessage(role="user", content="What is the weather in paris?")
    reply = LLM.chat_with_tools([tool], user_msg=question, tool_required=True)
    (call,) = LLM.get_tool_calls_from_response(reply)
    told = {"tool_call_id": call.tool_id}
    said = ChatMessage(role="tool", content=get_weather(**call.tool_kwargs), additional_kwargs=told)
    again = LLM.chat_with_tools([tool], chat_history=[question, reply.message, said])
    return {"name": call.tool_name, "arguments": call.tool_kwargs, "text": again.message.content}


async def _conversation(*, is_streamed: bool) -> dict[str, Any]:
    """Two questions to an agent with a memory."""
    recorder = Recorder()
    cities: list[str] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return WEATHER[city]

    llm = OpenAILike(
        model="neaptide-tiny",
        api_base=sys.argv[2],
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        max_retries=0,
        async_http_client=recorder.async_client(),
    )
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(get_weather)], llm=llm, streaming=is_streamed)
    memory = ChatMemoryBuffer.from_defaults(llm=llm)
    seen: dict[str, Any] = {"answers": [], "cities": cities, "thoughts": []}
    for question in (FIRST, SECOND):
        handler = agent.run(question, memory=memory)
        async for event in handler.stream_events():
            if isinstance(event, AgentOutput):
                blocks = [block for block in event.response.blocks if isinstance(block, ThinkingBlock)]
                seen["thoughts"] += [block.content for block in blocks]
        seen["answers"].append((await handler).response.content)
    return seen | {"batch": said_in(recorder.last_as_batch(sys.argv[2]))}


def conversation() -> dict[str, Any]:
    return asyncio.run(_conversation(is_streamed=False))


def conversation_stream() -> dict[str, Any]:
    return asyncio.run(_conversation(is_streamed=True))


SCENARIOS: list[Callable[[], dict[str, Any]]] = [
    chat,
    stream,
    structured,
    tools,
    two_turns,
    conversation,
    conversation_stream,
]

if __name__ == "__main__":
    print(json.dumps({scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]]()))

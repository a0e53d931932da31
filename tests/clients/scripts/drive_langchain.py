"""Runs in the environment of ``langchain-openai``: one scenario a run; what it saw is printed as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from recording import FIRST, SECOND, WEATHER, Recorder, said_in

QUESTION = "What is 21 + 34?"
PROMPT = f"<|bos|><|user|>{QUESTION}<|end|><|assistant|>"
OPTIONS: dict[str, Any] = {
    "model": "neaptide-tiny",
    "base_url": sys.argv[2],
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 64,
    "max_retries": 0,
}


def invoke() -> dict[str, Any]:
    reply = ChatOpenAI(**OPTIONS).invoke(QUESTION)
    finish_reason = reply.response_metadata["finish_reason"]
    return {"text": reply.content, "usage": reply.usage_metadata, "finish_reason": finish_reason}


def stream() -> dict[str, Any]:
    chunks = list(ChatOpenAI(**OPTIONS, stream_usage=True).stream(QUESTION))
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata is not None]
    return {"texts": [chunk.content for chunk in chunks], "usages": usages}


def structured_output() -> dict[str, Any]:
    schema = {
        "title": "Side",
        "description": "A side.",
        "type": "object",
        "properties": {"side": {"enum": ["left", "right"]}},
        "required": ["side"],
        "additionalProperties": False,
    }
    seen: dict[str, Any] = {}
    chat = ChatOpenAI(**OPTIONS | {"max_tokens": 300})
    for method in ("json_schema", "function_calling"):
        seen[method] = chat.with_structured_output(schema, method=method).invoke(QUESTION)
    # No schema reaches the server: an object comes, and the model knows how to end it if it is asked for one.
    formed = chat.with_structured_output(None, method="json_mode", include_raw=True)
    seen["json_mode"] = formed.invoke(f"{QUESTION} Answer in JSON.")["raw"].content
    return seen


@tool
def get_weather(city: Literal["paris", "rome"]) -> str:
    """The weather of a city."""
    return "sunny"


def _two_turns(**options: Any) -> dict[str, Any]:
    """The first turn is forced and streamed; in the second the model is free to call again."""
    chat = ChatOpenAI(**OPTIONS | {"max_tokens": 200}, **options)
    question = HumanMessage("What is the weather in paris?")
    forced = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    first, *rest = forced.stream([question])
    for piece in rest:
        first += piece
    (call,) = first.tool_calls
    said = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    again = chat.bind_tools([get_weather]).invoke([question, first, said])
    return {"name": call["name"], "arguments": call["args"], "text": again.text}


def two_turns() -> dict[str, Any]:
    return _two_turns()


def two_turns_responses() -> dict[str, Any]:
    return _two_turns(use_responses_api=True)


def responses() -> dict[str, Any]:
    (part,) = ChatOpenAI(**OPTIONS, use_responses_api=True).invoke(QUESTION).content
    return {"text": part["text"]}


def flex() -> dict[str, Any]:
    reply = ChatOpenAI(**OPTIONS, service_tier="flex").invoke(QUESTION)
    return {"text": reply.content, "service_tier": reply.response_metadata["service_tier"]}


def completion() -> dict[str, Any]:
    return {"text": OpenAI(**OPTIONS).invoke(PROMPT)}


def completion_stream() -> dict[str, Any]:
    return {"text": "".join(OpenAI(**OPTIONS).stream(PROMPT))}


def _thoughts(message: AIMessage) -> list[str]:
    """Reasoning that the Responses API gave; of chats this client drops it."""
    blocks = message.content if isinstance(message.content, list) else []
    return [
        "".join(part["text"] for part in block.get("content", []))
        for block in blocks
        if isinstance(block, dict) and block["type"] == "reasoning"
    ]


def _conversation(*, is_chat: bool, is_streamed: bool) -> dict[str, Any]:
    """Two questions to an agent of LangGraph."""
    recorder = Recorder()
    cities: list[str] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return WEATHER[city]

    chat = ChatOpenAI(
        model="neaptide-tiny",
        base_url=sys.argv[2],
        api_key="none",
        max_retries=0,
        http_client=recorder.client(),
        use_responses_api=not is_chat,
        include=None if is_chat else ["reasoning.encrypted_content"],
        streaming=is_streamed,
    )
    agent = create_agent(chat, [get_weather])
    said: list[Any] = []
    answers: list[str] = []
    for question in (FIRST, SECOND):
        asked: Any = {"messages": [*said, HumanMessage(question)]}
        if is_streamed:
            events = list(agent.stream(asked, stream_mode=["messages", "values"]))
            last = [state for mode, state in events if mode == "values"][-1]
        else:
            last = agent.invoke(asked)
        said = last["messages"]
        answers.append(said[-1].text)
    thoughts = [
        thought for message in said if isinstance(message, AIMessage) for thought in _thoughts(message) if thought
    ]
    batch = said_in(recorder.last_as_batch(sys.argv[2]))
    return {"answers": answers, "cities": cities, "thoughts": thoughts, "batch": batch}


def conversation() -> dict[str, Any]:
    return _conversation(is_chat=False, is_streamed=False)


def conversation_stream() -> dict[str, Any]:
    return _conversation(is_chat=False, is_streamed=True)


def conversation_chat() -> dict[str, Any]:
    return _conversation(is_chat=True, is_streamed=False)


def conversation_chat_stream() -> dict[str, Any]:
    return _conversation(is_chat=True, is_streamed=True)


SCENARIOS: list[Callable[[], dict[str, Any]]] = [
    invoke,
    stream,
    structured_output,
    two_turns,
    two_turns_responses,
    responses,
    flex,
    completion,
    completion_stream,
    conversation,
    conversation_stream,
    conversation_chat,
    conversation_chat_stream,
]

if __name__ == "__main__":
    print(json.dumps({scenario.__name__: scenario for scenario in SCENARIOS}[sys.argv[1]]()))

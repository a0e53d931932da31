"""LiteLLM's proxy in front of the server, as ``hosted_vllm``, and the official client in front of the proxy."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.clients.conversation import QUESTIONS, seen
from tests.clients.environment import ClientEnvironment
from tests.clients.scripts.recording import WEATHER, answer_of_batch, said_in
from tests.e2e.server import RunningServer, free_port
from tests.patience import until_here

LITELLM = ClientEnvironment("litellm")
KEY = "sk-of-the-proxy"
MODEL = "neaptide-tiny"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
PASSED_THROUGH = {"custom-llm-provider": "hosted_vllm"}
"""Headers of files and batches."""
pytestmark = LITELLM.marks


@pytest.fixture(scope="module")
def proxy(scripted: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    directory = tmp_path_factory.mktemp("proxy")
    behind = {"api_base": scripted.base_url, "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": {"model": f"hosted_vllm/{MODEL}", **behind}}],
        "files_settings": [{"custom_llm_provider": "hosted_vllm", **behind}],
        "general_settings": {"master_key": KEY},
    }
    (directory / "config.yaml").write_text(json.dumps(config))
    port = free_port()
    arguments = ["--config", str(directory / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    with (directory / "log").open("wb") as log, LITELLM.start("litellm", *arguments, log=log) as process:
        try:
            until_here(lambda: _is_live(process, port), (directory / "log").read_text)
            base_url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0, default_headers=PASSED_THROUGH) as client:
                yield client
        finally:
            process.kill()


def _is_live(process: "subprocess.Popen[bytes]", port: int) -> bool:
    assert process.poll() is None
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/liveliness").status_code == 200
    except httpx.TransportError:
        return False


def _whole(client: openai.OpenAI, messages: list[Any]) -> dict[str, Any]:
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    return reply.choices[0].message.model_dump(exclude_none=True)


def _joined(client: openai.OpenAI, messages: list[Any]) -> dict[str, Any]:
    """The same of a stream's deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, stream=True):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                if part.id:
                    function = {"name": part.function and part.function.name, "arguments": ""}
                    message["tool_calls"].append({"id": part.id, "type": "function", "function": function})
                added = (part.function and part.function.arguments) or ""
                message["tool_calls"][part.index]["function"]["arguments"] += added
    return {key: value for key, value in message.items() if value}


@pytest.mark.parametrize("answer", [_whole, _joined])
def test_two_turns_with_a_tool_and_reasoning_and_a_batch(proxy: openai.OpenAI, answer: Any) -> None:
    messages: list[Any] = []
    found: dict[str, Any] = {"answers": [], "cities": [], "thoughts": []}
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for _ in range(2):
            messages.append(answer(proxy, messages))
            found["thoughts"].append(messages[-1]["reasoning_content"])
            for call in messages[-1].get("tool_calls", ()):
                city = json.loads(call["function"]["arguments"])["city"]
                found["cities"].append(city)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": WEATHER[city]})
        found["answers"].append(messages[-1]["content"])
    body = {"model": MODEL, "messages": messages[:-1], "tools": TOOLS}
    batch = answer_of_batch(proxy, "/v1/chat/completions", body)
    assert found | {"batch": said_in(batch)} == seen(remembers=True)


def test_a_mistake_in_a_request_comes_back_as_one(proxy: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        proxy.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hm."}], temperature=9)

"""Sixty schemas over a vocabulary of 49,152 tokens: whatever ended by itself is valid."""

import asyncio
from typing import Any

import openai
import pytest

from tests.e2e.server import RunningServer
from tests.e2e.structured.test_many_schemas import check, some_schemas
from tests.real.conftest import NAME

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
NUM_SCHEMAS, AT_ONCE = 60, 12


def asking(schema: dict[str, Any], temperature: float) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": "Invent one record of a library, as JSON."}]
    fields = {"temperature": temperature, "seed": 7, "max_completion_tokens": 256, "response_format": form}
    return {"model": NAME, "messages": messages, **fields}


async def test_answers_to_sixty_schemas_are_valid(server: RunningServer) -> None:
    places, finishes = asyncio.Semaphore(AT_ONCE), []

    async def ask(schema: dict[str, Any], temperature: float, streamed: bool) -> None:
        async with places:
            if streamed:
                text, finish = "", ""
                async for chunk in await client.chat.completions.create(stream=True, **asking(schema, temperature)):
                    text += chunk.choices[0].delta.content or ""
                    finish = chunk.choices[0].finish_reason or finish
            else:
                (choice,) = (await client.chat.completions.create(**asking(schema, temperature))).choices
                text, finish = choice.message.content, choice.finish_reason
        finishes.append(finish)
        if finish == "stop":
            check(schema, text)

    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        async with asyncio.TaskGroup() as group:
            for index, schema in enumerate(some_schemas(NUM_SCHEMAS)):
                for temperature in (0.0, 1.0):
                    group.create_task(ask(schema, temperature, streamed=index % 2 == 1))
    print(f"{finishes.count('stop')} of {len(finishes)} ended by themselves")
    assert len(finishes) == 2 * NUM_SCHEMAS
    assert set(finishes) <= {"stop", "length"}
    assert finishes.count("stop") >= 0.9 * len(finishes)

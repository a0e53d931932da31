"""Generated schemas through the real server, the embedded model and the real client: whatever ended by itself is valid.

Temperatures 0 and 1, streamed and not, free text beside. Preemptions are forced where the engine is at hand
(``tests/executors/grammars/test_grammars_at_length.py``).
"""

import asyncio
import json
import random
from typing import Any

import jsonschema_rs
import openai
import pytest

from tests.e2e.conftest import KEYS
from tests.e2e.server import RunningServer
from tests.executors.grammars.test_grammars_at_length import random_schema

MODEL = "neaptide/tiny"
AT_ONCE = 12
FREE = "free text"


class Tally:
    """Counts answers; the first one that is not valid fails the test."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self._places = asyncio.Semaphore(AT_ONCE)
        self.ended = self.cut = 0
        self.free: set[str] = set()

    async def ask(self, schema: dict[str, Any], variant: int) -> None:
        """Even variants are greedy, every second pair is streamed."""
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        fields = {"response_format": form, "temperature": float(variant % 2), "seed": variant, "max_tokens": 200}
        text, reason = await self._answer(variant % 4 > 1, [f"Say something, {variant}."], **fields)
        if reason == "stop":
            jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(text))
            self.ended += 1
        else:
            assert reason == "length"
            self.cut += 1

    async def ask_freely(self) -> None:
        text, _ = await self._answer(False, [FREE], temperature=0.0, max_tokens=20)
        self.free.add(text)

    async def _answer(self, streamed: bool, said: list[str], **fields: Any) -> tuple[str, str]:
        messages: Any = [{"role": "user", "content": content} for content in said]
        async with self._places:
            if not streamed:
                reply = await self._client.chat.completions.create(model=MODEL, messages=messages, **fields)
                return reply.choices[0].message.content or "", reply.choices[0].finish_reason
            text, reason = "", ""
            stream = await self._client.chat.completions.create(model=MODEL, messages=messages, stream=True, **fields)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            return text, reason


async def ask_all(server: RunningServer, num_schemas: int, per_schema: int) -> Tally:
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(num_schemas)]
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=KEYS[0], max_retries=0) as client:
        tally = Tally(client)
        async with asyncio.TaskGroup() as group:
            for schema in schemas:
                for variant in range(per_schema):
                    group.create_task(tally.ask(schema, variant))
                group.create_task(tally.ask_freely())
    return tally


async def test_a_few_schemas(embedded: RunningServer) -> None:
    tally = await ask_all(embedded, num_schemas=5, per_schema=4)
    assert tally.ended > 15
    assert len(tally.free) == 1


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_two_thousand_answers_to_two_hundred_schemas(embedded: RunningServer) -> None:
    tally = await ask_all(embedded, num_schemas=200, per_schema=10)
    assert tally.ended + tally.cut == 2000
    assert tally.ended > 1800

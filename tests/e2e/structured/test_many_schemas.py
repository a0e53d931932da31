"""Generated schemas through real servers and the real client: whatever ended by itself is valid.

The embedded model and a random one, temperatures 0 and 1, streamed and not, in batches too, free text beside; in the
long form the engine preempts a third of them every second step. One step ahead is tried where the engine is at hand
(``tests/executors/grammars/test_grammars_at_length.py``).
"""

import asyncio
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest

from neaptide.launch.serve import embedded_model_path
from tests.e2e.conftest import KEYS
from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal
from tests.executors.driver import write_checkpoint
from tests.executors.grammars.test_grammars_at_length import random_schema

if find_spec("jsonschema") is not None:
    from jsonschema import Draft202012Validator

MODEL = "neaptide/tiny"
AT_ONCE = 24
FREE = "free text"
PER_SCHEMA = 10


def check(schema: dict[str, Any], text: str) -> None:
    """By a second validator as well, where there is one."""
    document = json.loads(text)
    jsonschema_rs.validator_for(schema, validate_formats=True).validate(document)
    if find_spec("jsonschema") is not None:
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(document)


def asking(schema: dict[str, Any], variant: int) -> dict[str, Any]:
    """Even variants are greedy."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": f"Say something, {variant}."}]
    fields = {"response_format": form, "temperature": float(variant % 2), "seed": variant, "max_tokens": 250}
    return {"model": MODEL, "messages": messages, **fields}


class Tally:
    """Counts answers; the first one that is not valid fails the test."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self._places = asyncio.Semaphore(AT_ONCE)
        self.ended = self.cut = 0
        self.free: set[str] = set()

    async def ask(self, schema: dict[str, Any], variant: int) -> None:
        """Every second pair is streamed."""
        text, reason = await self._answer(variant % 4 > 1, **asking(schema, variant))
        self.take(schema, text, reason)

    def take(self, schema: dict[str, Any], text: str, reason: str) -> None:
        if reason == "stop":
            check(schema, text)
            self.ended += 1
        else:
            assert reason == "length"
            self.cut += 1

    async def ask_freely(self) -> None:
        messages = [{"role": "user", "content": FREE}]
        text, _ = await self._answer(False, model=MODEL, messages=messages, temperature=0.0, max_tokens=20)
        self.free.add(text)

    async def _answer(self, streamed: bool, **fields: Any) -> tuple[str, str]:
        async with self._places:
            if not streamed:
                reply = await self._client.chat.completions.create(**fields)
                return reply.choices[0].message.content or "", reply.choices[0].finish_reason
            text, reason = "", ""
            stream = await self._client.chat.completions.create(stream=True, **fields)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
            return text, reason


def some_schemas(count: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [random_schema(rng) for _ in range(count)]


async def ask_all(server: RunningServer, schemas: list[dict[str, Any]], per_schema: int) -> Tally:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=KEYS[0], max_retries=0) as client:
        tally = Tally(client)
        async with asyncio.TaskGroup() as group:
            for schema in schemas:
                for variant in range(per_schema):
                    group.create_task(tally.ask(schema, variant))
                group.create_task(tally.ask_freely())
    return tally


def ask_in_a_batch(server: RunningServer, schemas: list[dict[str, Any]], tally: Tally) -> None:
    """Two answers to each, beside as much free text."""
    asked = [(schema, asking(schema, variant)) for schema in schemas for variant in range(2)]
    free = {"model": MODEL, "messages": [{"role": "user", "content": FREE}], "max_tokens": 20, "temperature": 0}
    batch_id = submit_batch(server, [body for _, body in asked] + [free] * len(asked))
    batch = wait_terminal(server, batch_id)
    assert batch["request_counts"] == {"total": 2 * len(asked), "completed": 2 * len(asked), "failed": 0}
    for line in result_lines(server, batch):
        (choice,) = line["response"]["body"]["choices"]
        index = int(line["custom_id"][1:])
        if index < len(asked):
            tally.take(asked[index][0], choice["message"]["content"], choice["finish_reason"])
        else:
            tally.free.add(choice["message"]["content"])


async def test_a_few_schemas(embedded: RunningServer) -> None:
    tally = await ask_all(embedded, some_schemas(5), per_schema=4)
    assert tally.ended > 15
    assert len(tally.free) == 1


# ---- the long form -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worst case: it has no idea of what it should say. With the embedded model's tokenizer and template."""
    directory = tmp_path_factory.mktemp("random-model")
    write_checkpoint(directory, vocab_size=420, max_position_embeddings=1024)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded_model_path() / name, directory)
    return directory


@pytest.fixture(scope="module", params=["embedded", "random"])
def rough(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose engine preempts a third of what it runs every second step."""
    flags = ["--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "1024", "--shadow", "off"]
    flags += ["--api-key", KEYS[0]]
    if request.param == "random":
        flags.insert(0, str(request.getfixturevalue("random_model")))
    else:
        flags += ["--profile", "cpu-neaptide-tiny"]
    paths = [str(Path(__file__).parent / "preempting"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    with RunningServer(tmp_path_factory.mktemp("rough"), *flags, env=env) as server:
        server.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        yield server


def num_preemptions(server: RunningServer) -> int:
    counts = re.findall(r"^neaptide_preemptions_total\{.*\} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    return sum(int(float(count)) for count in counts)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fourth", range(4))
async def test_two_thousand_answers_to_two_hundred_schemas(rough: RunningServer, fourth: int) -> None:
    schemas = some_schemas(200)[fourth * 50 : fourth * 50 + 50]
    before = num_preemptions(rough)
    tally = await ask_all(rough, schemas, PER_SCHEMA)
    assert tally.ended + tally.cut == 500
    await asyncio.to_thread(ask_in_a_batch, rough, schemas, tally)
    assert tally.ended + tally.cut == 600
    preemptions = num_preemptions(rough) - before
    print(f"{tally.ended} ended, {tally.cut} cut, {preemptions} preemptions")
    assert tally.ended > 540
    assert len(tally.free) == 1
    assert preemptions > 600

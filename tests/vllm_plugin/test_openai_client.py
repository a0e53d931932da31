"""The suites of files and batches with the real ``openai`` client, on ``vllm serve``; and lines of every kind."""

import json
from typing import Any

import openai
import pytest

from tests.e2e.conftest import KEYS
from tests.e2e.server import RunningServer, result_lines, wait_terminal
from tests.e2e.test_openai_batches import (
    test_a_batch_with_a_bad_line_fails_before_anything_runs,
    test_a_deleted_file_is_gone,
    test_a_file_can_be_described_and_read_back,
    test_a_window_that_is_not_offered_is_refused,
    test_an_unknown_batch_is_not_found,
    test_batch_from_upload_to_results,
    test_cancelled_batch_accounts_for_every_line,
    test_cancelling_a_batch_that_has_ended_is_a_conflict,
    test_files_expire_when_that_is_asked,
    test_the_sdk_pages_through_all_files,
    upload_lines,
)
from tests.e2e.test_openai_client import MODEL, QUESTION
from tests.vllm_plugin.server import needs_plugin

__all__ = [
    "test_a_batch_with_a_bad_line_fails_before_anything_runs",
    "test_a_deleted_file_is_gone",
    "test_a_file_can_be_described_and_read_back",
    "test_a_window_that_is_not_offered_is_refused",
    "test_an_unknown_batch_is_not_found",
    "test_batch_from_upload_to_results",
    "test_cancelled_batch_accounts_for_every_line",
    "test_cancelling_a_batch_that_has_ended_is_a_conflict",
    "test_files_expire_when_that_is_asked",
    "test_the_sdk_pages_through_all_files",
]
pytestmark = needs_plugin

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"enum": [1, 2]}}}}}


def run(server: RunningServer, client: openai.OpenAI, endpoint: Any, bodies: list[dict[str, Any]]) -> list[Any]:
    """Bodies of the responses, in the order of the lines."""
    file_id = upload_lines(client, endpoint, bodies)
    batch = client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h")
    lines = result_lines(server, wait_terminal(server, batch.id))
    assert sorted(line["custom_id"] for line in lines) == sorted(f"c{i}" for i in range(len(bodies)))
    return [line["response"]["body"] for line in sorted(lines, key=lambda line: int(line["custom_id"][1:]))]


def test_a_line_with_a_tool_is_answered_as_a_chat_is(embedded: RunningServer, client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    body: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "tools": [TOOL], "tool_choice": choice}
    (found,) = run(embedded, client, "/v1/chat/completions", [body])
    chat = client.chat.completions.create(model=MODEL, **body)
    (call,) = found["choices"][0]["message"]["tool_calls"]
    assert chat.choices[0].message.tool_calls is not None
    expected = chat.choices[0].message.tool_calls[0].model_dump()["function"]
    assert (call["function"]["name"], call["function"]) == ("add", expected)


def test_a_line_with_a_schema_follows_it(embedded: RunningServer, client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "side", "schema": {"enum": ["left", "right"]}}}
    body = {"messages": QUESTION, "temperature": 0, "response_format": schema}
    (found,) = run(embedded, client, "/v1/chat/completions", [body])
    assert json.loads(found["choices"][0]["message"]["content"]) in ("left", "right")


def test_completions_with_several_choices_are_one_line(embedded: RunningServer, client: openai.OpenAI) -> None:
    bodies = [{"prompt": "2+2=", "n": 2, "max_tokens": 3}, {"prompt": ["1+1=", "3+3="], "max_tokens": 3}]
    found = run(embedded, client, "/v1/completions", bodies)
    assert [len(reply["choices"]) for reply in found] == [2, 2]


def test_a_batch_of_responses(embedded: RunningServer, client: openai.OpenAI) -> None:
    (found,) = run(embedded, client, "/v1/responses", [{"input": "What is 21 + 34?", "temperature": 0}])
    online = client.responses.create(model=MODEL, input="What is 21 + 34?", temperature=0)
    assert found["output"][0]["content"][0]["text"] == online.output_text


def test_a_flex_chat_is_answered(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, service_tier="flex")
    assert (reply.choices[0].message.content or "").endswith("55")


def test_batches_of_one_key_are_not_anothers(embedded: RunningServer, client: openai.OpenAI) -> None:
    made = client.files.create(file=("in.jsonl", b"{}"), purpose="user_data")
    with openai.OpenAI(base_url=embedded.base_url, api_key=KEYS[1], max_retries=0) as other:
        with pytest.raises(openai.NotFoundError):
            other.files.retrieve(made.id)


def test_an_unknown_key_gets_no_files(embedded: RunningServer) -> None:
    with openai.OpenAI(base_url=embedded.base_url, api_key="unknown", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError):
            other.files.list()

"""The ``litellm`` SDK: both ways to name a server like ours, files and batches."""

import pytest

from tests.clients.environment import ClientEnvironment
from tests.e2e.server import RunningServer

LITELLM = ClientEnvironment("litellm")
ANSWER = "1+4=5, 2+3=5 so 55"
PROVIDERS = ("openai", "hosted_vllm")
pytestmark = LITELLM.marks


@pytest.mark.parametrize("provider", PROVIDERS)
def test_completion(server: RunningServer, provider: str) -> None:
    seen = LITELLM.drive(f"{provider}_completion", server.base_url)
    assert seen["text"] == ANSWER
    assert seen["finish_reason"] == "stop"
    assert seen["usage"]["total_tokens"] == seen["usage"]["prompt_tokens"] + seen["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("provider", PROVIDERS)
def test_stream_arrives_in_pieces_and_ends_with_usage(server: RunningServer, provider: str) -> None:
    seen = LITELLM.drive(f"{provider}_stream", server.base_url)
    pieces = [text for text in seen["texts"] if text]
    assert "".join(pieces) == ANSWER
    assert len(pieces) > 2
    assert seen["usages"][-1]["completion_tokens"] >= len(pieces)


def test_refusal_arrives_as_bad_request(server: RunningServer) -> None:
    assert LITELLM.drive("refusal", server.base_url) == {"status": 400}


def test_batch_from_upload_to_results(server: RunningServer) -> None:
    seen = LITELLM.drive("batch", server.base_url)
    assert seen["status"] == "completed"
    assert (seen["counts"]["completed"], seen["counts"]["failed"], seen["counts"]["total"]) == (5, 0, 5)
    assert seen["answers"] == {f"c{i}": ANSWER for i in range(5)}
    assert seen["listed"]

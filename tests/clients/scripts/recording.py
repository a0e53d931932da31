"""Records the requests that a client sends, and sends the last one again as a batch line."""

import json
import time
from typing import Any

import openai

try:
    import httpx2 as httpx
except ImportError:  # Some SDKs want an older `openai`, which uses the older package.
    import httpx

FIRST, SECOND = "Do I need an umbrella in Cologne?", "And in Rome?"
WEATHER = {"Cologne": "rain", "Rome": "sun"}
_POLL_S = 0.1
_TERMINAL = ("completed", "failed", "expired", "cancelled")


class Recorder:
    """Bodies of the requests that its HTTP clients send."""

    def __init__(self) -> None:
        self._sent: list[tuple[str, dict[str, Any]]] = []

    def client(self) -> httpx.Client:
        return httpx.Client(event_hooks={"request": [self._take]})

    def async_client(self) -> httpx.AsyncClient:
        async def take(request: httpx.Request) -> None:
            self._take(request)

        return httpx.AsyncClient(event_hooks={"request": [take]})

    def _take(self, request: httpx.Request) -> None:
        if request.content:
            self._sent.append((request.url.path, json.loads(request.content)))

    def last_as_batch(self, base_url: str) -> Any:
        """The body of the answer to the last request, from a batch with it."""
        endpoint, body = self._sent[-1]
        body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
        return answer_of_batch(client, endpoint, body)


def answer_of_batch(client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> Any:
    """The body of the only answer of a batch with one line."""
    line = {"custom_id": "only", "method": "POST", "url": endpoint, "body": body}
    upload = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    created = client.batches.create(
        input_file_id=upload.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
    )
    while (now := client.batches.retrieve(created.id)).status not in _TERMINAL:
        time.sleep(_POLL_S)
    if now.output_file_id is None:
        raise RuntimeError(f"the batch has no output: {now}")
    (line_out,) = client.files.content(now.output_file_id).text.splitlines()
    return json.loads(line_out)["response"]["body"]


def said_in(answer: Any) -> list[str]:
    """Reasoning and text of a chat completion or a response."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        return [message["reasoning_content"], message["content"]]
    return [part["text"] for item in answer["output"] for part in item["content"]]

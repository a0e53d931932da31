"""Runs in the environment of ``litellm``: one scenario a run; what it saw is printed as JSON."""

import io
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import litellm

litellm.suppress_debug_info = True
MODEL = "neaptide-tiny"
MESSAGES = [{"role": "user", "content": "What is 21 + 34?"}]
SERVER: dict[str, Any] = {"api_base": sys.argv[2], "api_key": "none"}
OPENAI: dict[str, Any] = {"custom_llm_provider": "openai", **SERVER}
ENDPOINT = "/v1/chat/completions"
POLL_S = 0.2
TERMINAL = ("completed", "failed", "expired", "cancelled")


def complete(provider: str, **options: Any) -> Any:
    return litellm.completion(
        model=f"{provider}/{MODEL}", messages=MESSAGES, temperature=0, max_tokens=64, num_retries=0, **SERVER, **options
    )


def completion(provider: str) -> dict[str, Any]:
    reply = complete(provider)
    choice = reply.choices[0]
    return {"text": choice.message.content, "finish_reason": choice.finish_reason, "usage": reply.usage.model_dump()}


def stream(provider: str) -> dict[str, Any]:
    chunks = list(complete(provider, stream=True, stream_options={"include_usage": True}))
    usages = [chunk.usage.model_dump() for chunk in chunks if getattr(chunk, "usage", None) is not None]
    return {"texts": [chunk.choices[0].delta.content for chunk in chunks if chunk.choices], "usages": usages}


def refusal() -> dict[str, Any]:
    try:
        complete("openai", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}})
    except litellm.BadRequestError as refused:
        return {"status": refused.status_code}
    return {}


def batch() -> dict[str, Any]:
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 64}
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": ENDPOINT, "body": body} for i in range(5)]
    content = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    upload = litellm.create_file(file=("lines.jsonl", content), purpose="batch", **OPENAI)
    created = litellm.create_batch(input_file_id=upload.id, endpoint=ENDPOINT, completion_window="24h", **OPENAI)
    while (now := litellm.retrieve_batch(batch_id=created.id, **OPENAI)).status not in TERMINAL:
        time.sleep(POLL_S)
    output = litellm.file_content(file_id=now.output_file_id, **OPENAI).content
    results = [json.loads(line) for line in output.splitlines()]
    return {
        "status": now.status,
        "counts": now.request_counts.model_dump(),
        "answers": {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in results},
        "listed": created.id in [entry.id for entry in litellm.list_batches(limit=5, **OPENAI).data],
    }


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "openai_completion": partial(completion, "openai"),
    "hosted_vllm_completion": partial(completion, "hosted_vllm"),
    "openai_stream": partial(stream, "openai"),
    "hosted_vllm_stream": partial(stream, "hosted_vllm"),
    "refusal": refusal,
    "batch": batch,
}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]]()))

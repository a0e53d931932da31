"""The real ``openai`` client over sockets, on the embedded model."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from neaptide.server.launch import embedded_model_path
from tests.e2e.server import RunningServer, result_lines, wait_terminal

MODEL = "neaptide-tiny"
QUESTION: list[Any] = [{"role": "user", "content": "What is 21 + 34?"}]


@pytest.fixture(scope="module")
def client(embedded: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=embedded.base_url, api_key="none", max_retries=0) as client:
        yield client


def reference_text() -> str:
    """What the checkpoint answers through ``transformers``."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=64, do_sample=False)
    return str(tokenizer.decode(out[0][ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_chat_answers_what_the_reference_answers(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=64)
    assert reply.choices[0].message.content == reference_text()
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stream_carries_the_same_text_and_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_async_client(embedded: RunningServer, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    async with openai.AsyncOpenAI(base_url=embedded.base_url, api_key="none", max_retries=0) as asynchronous:
        reply = await asynchronous.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == whole.choices[0].message.content


def test_flex_says_that_it_was_flex(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, service_tier="flex")
    assert reply.service_tier == "flex"


def test_token_ids_with_echo_and_logprobs_score_the_prompt(client: openai.OpenAI) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
    reply = client.completions.create(model=MODEL, prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    for position in range(1, len(ids)):
        assert logprobs.token_logprobs[position] == pytest.approx(
            float(expected[position - 1, ids[position]]), abs=2e-3
        )


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_come_in_the_envelope(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=QUESTION)
    assert unknown.value.code == "model_not_found"


def test_batch_from_upload_to_results(embedded: RunningServer, client: openai.OpenAI) -> None:
    online = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=64)
    lines = []
    for i in range(20):
        body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 64}
        if i == 7:
            body["temperature"] = 9
        lines.append({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    content = "\n".join(json.dumps(line) for line in lines).encode()
    upload = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=upload.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"run": "1"}
    )
    done = wait_terminal(embedded, batch.id)
    assert done["status"] == "completed"
    assert done["request_counts"] == {"total": 20, "completed": 19, "failed": 1}
    final = client.batches.retrieve(batch.id)
    assert final.output_file_id is not None
    assert final.error_file_id is not None
    output = [json.loads(line) for line in client.files.content(final.output_file_id).iter_lines()]
    assert [line["custom_id"] for line in output] == [f"c{i}" for i in range(20) if i != 7]
    answers = {line["response"]["body"]["choices"][0]["message"]["content"] for line in output}
    assert answers == {online.choices[0].message.content}
    (error,) = [json.loads(line) for line in client.files.content(final.error_file_id).iter_lines()]
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert batch.id in [b.id for b in client.batches.list(limit=5)]


def test_cancelled_batch_accounts_for_every_line(embedded: RunningServer, client: openai.OpenAI) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 400, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        for i in range(200)
    ]
    upload = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=upload.id, endpoint="/v1/chat/completions", completion_window="24h")
    embedded.wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = wait_terminal(embedded, batch.id)
    assert done["status"] == "cancelled"
    lines_out = result_lines(embedded, done)
    assert sorted(line["custom_id"] for line in lines_out) == sorted(f"c{i}" for i in range(200))
    codes = [line["error"]["code"] for line in lines_out if line["error"] is not None]
    assert set(codes) == {"batch_cancelled"}
    # The engine is free again for others.
    assert client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0).choices[0].message.content

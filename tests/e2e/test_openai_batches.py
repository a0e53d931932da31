"""Files and batches through the real ``openai`` client over sockets."""

import json
import re
from typing import Any

import openai
import pytest

from tests.e2e.server import RunningServer, result_lines, wait_terminal
from tests.e2e.test_openai_client import MODEL, QUESTION


def upload_lines(client: openai.OpenAI, endpoint: str, bodies: list[dict[str, Any]]) -> str:
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
        for i, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("lines.jsonl", content), purpose="batch").id


def test_a_file_can_be_described_and_read_back(client: openai.OpenAI) -> None:
    content = b'{"a": 1}\n'
    made = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.status) == ("file", len(content), "in.jsonl", "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content


def test_files_expire_when_that_is_asked(client: openai.OpenAI) -> None:
    made = client.files.create(
        file=("in.jsonl", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600


def test_a_deleted_file_is_gone(client: openai.OpenAI) -> None:
    made = client.files.create(file=("in.jsonl", b"{}"), purpose="user_data")
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


def test_the_sdk_pages_through_all_files(client: openai.OpenAI) -> None:
    made = {client.files.create(file=("in.jsonl", b"{}"), purpose="user_data").id for _ in range(3)}
    assert made <= {file.id for file in client.files.list(limit=1)}


def test_a_batch_of_completions(embedded: RunningServer, client: openai.OpenAI) -> None:
    file_id = upload_lines(client, "/v1/completions", [{"prompt": "2+2=", "temperature": 0, "max_tokens": 3}])
    batch = client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
    done = wait_terminal(embedded, batch.id)
    (line,) = result_lines(embedded, done)
    online = client.completions.create(model=MODEL, prompt="2+2=", temperature=0, max_tokens=3)
    assert line["response"]["body"]["choices"][0]["text"] == online.choices[0].text
    assert line["response"]["body"]["service_tier"] == "flex"


def test_a_batch_with_a_bad_line_fails_before_anything_runs(embedded: RunningServer, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", b'{"custom_id": "a"}'), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    done = wait_terminal(embedded, batch.id)
    assert done["status"] == "failed"
    failed = client.batches.retrieve(batch.id)
    assert failed.errors is not None
    assert [(error.line, error.code) for error in failed.errors.data or []] == [(1, "missing_required_parameter")]


def test_cancelling_a_batch_that_has_ended_is_a_conflict(embedded: RunningServer, client: openai.OpenAI) -> None:
    file_id = upload_lines(client, "/v1/completions", [{"prompt": "x", "max_tokens": 1}])
    batch = client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
    wait_terminal(embedded, batch.id)
    with pytest.raises(openai.ConflictError) as refused:
        client.batches.cancel(batch.id)
    assert refused.value.response.headers["x-should-retry"] == "false"


def test_a_window_that_is_not_offered_is_refused(client: openai.OpenAI) -> None:
    file_id = upload_lines(client, "/v1/completions", [{"prompt": "x", "max_tokens": 1}])
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="48h")  # type: ignore[arg-type]
    assert refused.value.param == "completion_window"


def test_an_unknown_batch_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_nothing")


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
    counts = {"total": len(lines), "completed": len(lines) - len(codes), "failed": 0}
    assert done["request_counts"] == counts, "a line that never ran has not failed"
    # The engine is free again for others.
    assert client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0).choices[0].message.content


def create_long_batch(client: openai.OpenAI, window: str) -> str:
    """38,400 answers of 256 tokens: on 256 seats 38,400 steps of 10 ms, which take more than five minutes."""
    body = {"model": "neaptide-tiny", "prompt": "2+2=", "n": 128, "max_tokens": 256, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}) for i in range(300)
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window=window,  # type: ignore[arg-type]
    )
    return batch.id


def outlook(client: openai.OpenAI, batch_id: str) -> str | None:
    batch = client.batches.retrieve(batch_id)
    assert batch.status in ("validating", "in_progress"), batch
    shown = (batch.model_extra or {})["neaptide"]
    return None if shown is None else str(shown["outlook"])


def metrics(server: RunningServer) -> str:
    return server.http.get("/metrics").raise_for_status().text


@pytest.mark.parametrize(("window", "expected"), [("5m", "infeasible"), ("24h", "on_time")])
def test_a_batch_is_flagged_if_its_window_is_too_short(simulated: RunningServer, window: str, expected: str) -> None:
    with openai.OpenAI(base_url=simulated.base_url, api_key="none", max_retries=0) as client:
        batch_id = create_long_batch(client, window)
        simulated.wait_for(lambda: outlook(client, batch_id) == expected)
        (count,) = re.findall(rf'neaptide_batches_by_outlook{{outlook="{expected}"}} (\S+)', metrics(simulated))
        assert float(count) >= 1.0
        assert (f"batch {batch_id} cannot end in its window" in simulated.log) == (expected == "infeasible")
        client.batches.cancel(batch_id)

"""A batch that cannot end in its window is flagged: API, metric and log of a real server."""

import json
import re

import openai
import pytest

from tests.e2e.server import RunningServer

LINES, CHOICES = 60, 128


def create(client: openai.OpenAI, window: str) -> str:
    """7,680 answers of 256 tokens: on 256 seats 7,680 steps, which take more than a minute."""
    body = {"prompt": "2+2=", "n": CHOICES, "max_tokens": 256, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body})
        for i in range(LINES)
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window=window,  # type: ignore[arg-type]
    )
    return batch.id


def outlook(client: openai.OpenAI, batch_id: str) -> str | None:
    shown = (client.batches.retrieve(batch_id).model_extra or {})["neaptide"]
    return None if shown is None else str(shown["outlook"])


def metrics(server: RunningServer) -> str:
    return server.http.get("/metrics").raise_for_status().text


@pytest.mark.parametrize(("window", "expected"), [("1m", "infeasible"), ("24h", "on_time")])
def test_a_batch_is_flagged_if_its_window_is_too_short(simulated: RunningServer, window: str, expected: str) -> None:
    with openai.OpenAI(base_url=simulated.base_url, api_key="none", max_retries=0) as client:
        batch_id = create(client, window)
        simulated.wait_for(lambda: outlook(client, batch_id) == expected)
        (count,) = re.findall(rf'neaptide_batches_by_outlook{{outlook="{expected}"}} (\S+)', metrics(simulated))
        assert float(count) >= 1.0
        assert (f"batch {batch_id} cannot end in its window" in simulated.log) == (expected == "infeasible")
        client.batches.cancel(batch_id)

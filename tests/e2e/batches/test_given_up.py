"""A step that the real server gives up for a chat: through two processes and kernels in C."""

import re
from itertools import count, cycle

import openai

from tests.e2e.server import RunningServer, result_lines, wait_terminal
from tests.e2e.test_openai_batches import upload_lines
from tests.e2e.test_openai_client import MODEL
from tests.patience import PATIENCE_S, Stopwatch

LINES = 24
TARGETS_MS = (10, 15, 20, 30)
"""One of them is shorter than the rest of a step and longer than the way to the engine, on a machine of any speed."""


def num_aborted(server: RunningServer) -> float:
    found = re.search(r"^neaptide_steps_given_up_total (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    assert found
    return float(found[1])


def test_a_chat_that_cannot_wait_has_a_step_given_up_and_the_batch_says_what_it_says_alone(
    embedded: RunningServer, client: openai.OpenAI
) -> None:
    before, since, targets_ms = num_aborted(embedded), Stopwatch(), cycle(TARGETS_MS)
    for first in count(step=LINES):
        prompts = [f"{number}, " * 400 for number in range(first, first + LINES)]
        bodies = [{"prompt": prompt, "temperature": 0, "max_tokens": 48} for prompt in prompts]
        file_id = upload_lines(client, "/v1/completions", bodies)
        batch = client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
        # A busy machine may be done with a batch before a chat has met a step of it.
        while client.batches.retrieve(batch.id).status != "completed" and num_aborted(embedded) == before:
            slo = {"ttft_slo_ms": next(targets_ms)}
            client.completions.create(model=MODEL, prompt="2+2=", max_tokens=1, extra_body=slo)
        done = wait_terminal(embedded, batch.id)
        if num_aborted(embedded) > before:
            break
        assert since.seconds < PATIENCE_S, "no step was given up"
    lines = {line["custom_id"]: line["response"]["body"] for line in result_lines(embedded, done)}
    assert len(lines) == LINES
    for number in (0, 11, 23):
        alone = client.completions.create(model=MODEL, prompt=prompts[number], temperature=0, max_tokens=48)
        assert lines[f"c{number}"]["choices"][0]["text"] == alone.choices[0].text

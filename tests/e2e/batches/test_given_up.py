"""Steps that the real server gives up for chats: through two processes and kernels in C."""

import re
from itertools import cycle, islice

import openai

from tests.e2e.server import RunningServer, result_lines, wait_terminal
from tests.e2e.test_openai_batches import upload_lines
from tests.e2e.test_openai_client import MODEL

PROMPTS = [f"{number}, " * 400 for number in range(24)]
MAX_CHATS = 400
TARGETS_MS = (10, 15, 20, 30)
"""One of them is shorter than the rest of a step and longer than the way to the engine, on a machine of any speed."""


def num_aborted(server: RunningServer) -> float:
    found = re.search(r"^neaptide_steps_given_up_total (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    assert found
    return float(found[1])


def test_chats_that_cannot_wait_have_steps_given_up_and_the_batch_says_what_it_says_alone(
    embedded: RunningServer, client: openai.OpenAI
) -> None:
    before = num_aborted(embedded)
    bodies = [{"prompt": prompt, "temperature": 0, "max_tokens": 48} for prompt in PROMPTS]
    file_id = upload_lines(client, "/v1/completions", bodies)
    batch = client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
    for target_ms in islice(cycle(TARGETS_MS), MAX_CHATS):
        client.completions.create(model=MODEL, prompt="2+2=", max_tokens=1, extra_body={"ttft_slo_ms": target_ms})
        if num_aborted(embedded) >= before + 3:
            break
    done = wait_terminal(embedded, batch.id)
    assert num_aborted(embedded) >= before + 3
    lines = {line["custom_id"]: line["response"]["body"] for line in result_lines(embedded, done)}
    assert len(lines) == len(PROMPTS)
    for number in (0, 11, 23):
        alone = client.completions.create(model=MODEL, prompt=PROMPTS[number], temperature=0, max_tokens=48)
        assert lines[f"c{number}"]["choices"][0]["text"] == alone.choices[0].text

"""The same answer after everything, on the real engine: two keys, sampling parameters, batch lines, a crowd beside."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import KEYS
from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal
from tests.patience import PATIENCE_S
from tests.server.http.test_errors import BAD_CHAT

CHAT = "/v1/chat/completions"
MODEL = "neaptide/tiny"
EXAMPLES = [
    {"role": role, "content": text}
    for pair in (("What is 21 + 34?", "55"), ("Reverse the word apple.", "elppa"))
    for role, text in zip(("user", "assistant"), pair, strict=True)
]


def canary(question: str, **fields: Any) -> dict[str, Any]:
    """On examples that all share, so that later ones find them in the cache."""
    messages = [*EXAMPLES, {"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_completion_tokens": 16, "ignore_eos": True} | fields


CANARIES = [
    canary("What is 412 + 177?", temperature=0),
    canary("What is 412 + 177?", temperature=0, logit_bias={"30": 3.0}, stop=["1+7"]),
    canary("Sort the words pear, fig and lime.", temperature=1.3, seed=7),
    canary("Spell the word river.", temperature=0.8, top_p=0.9, top_k=30, seed=8, n=2),
    canary("Spell the word stone.", temperature=0, repetition_penalty=1.3, logprobs=True, top_logprobs=2),
    canary("What is 9 - 4?", temperature=1.1, seed=9, frequency_penalty=0.8, presence_penalty=0.4, min_tokens=12),
]


def texts(reply: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Of each choice its text, how it ended, and its tokens where they are told."""
    return [
        (
            choice["message"]["content"],
            choice["finish_reason"],
            [entry["token"] for entry in (choice["logprobs"] or {}).get("content") or []],
        )
        for choice in reply["choices"]
    ]


def answers(http: httpx.Client, key: str) -> list[list[tuple[str, str, list[str]]]]:
    headers = {"Authorization": f"Bearer {key}"}
    return [texts(http.post(CHAT, json=body, headers=headers).raise_for_status().json()) for body in CANARIES]


@contextmanager
def crowd(server: RunningServer) -> Iterator[list[int]]:
    """Two clients that send what is good, what is bad, and what they do not wait for; the statuses that they saw."""
    stop = threading.Event()
    statuses: list[int] = []

    def visit(seed: int) -> None:
        rng = random.Random(seed)
        headers = {"Authorization": f"Bearer {KEYS[seed % 2]}"}
        with httpx.Client(base_url=server.http.base_url, headers=headers, timeout=PATIENCE_S) as http:
            while not stop.is_set():
                body = canary(f"What is {rng.randrange(900)} + {rng.randrange(900)}?", seed=rng.randrange(99))
                kind = rng.choice(("good", "flex", "bad", "left"))
                if kind == "left":
                    body |= {"stream": True, "max_completion_tokens": 200}
                    with http.stream("POST", CHAT, json=body) as reply:
                        next(reply.iter_bytes())
                        statuses.append(reply.status_code)
                    continue
                body |= {"service_tier": "flex"} if kind == "flex" else {}
                body |= rng.choice(BAD_CHAT)[0] if kind == "bad" else {}
                statuses.append(http.post(CHAT, json=body).status_code)

    threads = [threading.Thread(target=visit, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.acceptance("A23", "canaries with sampling parameters, two keys and batch lines, real engine in fp32")
def test_the_same_answer_after_everything(embedded: RunningServer) -> None:
    expected = answers(embedded.http, KEYS[0])
    assert len({text for choices in expected for text, _, _ in choices}) == len(CANARIES) + 1
    assert answers(embedded.http, KEYS[1]) == expected  # of a tenant that shares no block with the first
    with crowd(embedded) as statuses:
        assert answers(embedded.http, KEYS[1]) == expected
        batch = wait_terminal(embedded, submit_batch(embedded, CANARIES))
    assert {200, 400} <= set(statuses)
    assert not any(status >= 500 for status in statuses)
    assert batch["status"] == "completed"
    lines = {line["custom_id"]: line["response"]["body"] for line in result_lines(embedded, batch)}
    assert [texts(lines[f"c{index}"]) for index in range(len(CANARIES))] == expected
    assert answers(embedded.http, KEYS[0]) == expected
    assert answers(embedded.http, KEYS[1]) == expected

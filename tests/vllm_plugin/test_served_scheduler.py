"""Neaptide's scheduler in a real ``vllm serve``."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.server import result_lines, submit_batch, wait_terminal
from tests.vllm_plugin.server import MODEL, VllmServer, needs_plugin

# A start takes twenty seconds, and minutes on a busy machine.
pytestmark = [pytest.mark.timeout(3600), *needs_plugin]
SETTINGS = {"neaptide": {"ttft_ms": 60000, "tpot_ms": 6000, "log_interval_s": 0.5}}
NUM_TEXTS = 20
FLAGS = ("--scheduler-cls", "neaptide_vllm.scheduler", "--additional-config", json.dumps(SETTINGS))


def value(page: str, series: str) -> float:
    """Value of a series on vLLM's page of metrics."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    assert found is not None, f"no {series}"
    return float(found[1])


def test_two_flags_make_vllm_keep_targets_and_say_so(tmp_path: Path) -> None:
    with VllmServer(tmp_path, *FLAGS) as server, openai.OpenAI(base_url=server.base_url, api_key="none") as client:
        asked = [{"role": "user", "content": "What is 3 + 4?"}]
        texts = {
            client.chat.completions.create(model=MODEL, messages=asked, temperature=0, max_tokens=12, extra_body=extra)
            .choices[0]
            .message.content
            for extra in ({}, {"vllm_xargs": {"ttft_ms": 30000}}, {"priority": 1})
        }
        assert len(texts) == 1, "who is asked first changes no answer"
        server.wait_for(lambda: "neaptide, last" in server.log or bool(ask(client)))
        page = server.http.get("/metrics").text
        assert value(page, 'neaptide_scheduler_active{engine="0"}') == 1
        assert value(page, 'neaptide_target_seconds{engine="0",target="tpot"}') == 6
        assert value(page, 'neaptide_first_tokens_total{engine="0",in_time="true"}') >= 2
        assert value(page, 'neaptide_tokens_total{class="offline",engine="0"}') > 10
        assert "KV fetch" not in server.log


def test_without_the_flags_vllm_is_as_before(tmp_path: Path) -> None:
    """The package stays installed, and the data directory stays where it is."""
    with VllmServer(tmp_path, *FLAGS) as server:
        texts = greedy_texts(server)
        batch = wait_terminal(server, submit_batch(server, [asking(index) for index in range(NUM_TEXTS)]))
        assert [
            result["response"]["body"]["choices"][0]["message"]["content"] for result in result_lines(server, batch)
        ] == texts
        assert "neaptide_scheduler_active" in server.http.get("/metrics").text
        server.stop()
    with VllmServer(tmp_path, has_plugin=False) as server:
        assert greedy_texts(server) == texts
        page = server.http.get("/metrics").text
        assert "vllm:generation_tokens_total" in page
        assert "neaptide_" not in page
        assert [server.http.get(path).status_code for path in ("/v1/files", "/v1/batches")] == [404, 404]
        server.stop()


def asking(index: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is {index} + {3 * index}?"}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 16}


def greedy_texts(server: VllmServer) -> list[str]:
    """Answers to questions that are all asked at once."""
    with ThreadPoolExecutor(NUM_TEXTS) as threads:
        replies = threads.map(
            lambda index: server.http.post("/v1/chat/completions", json=asking(index)), range(NUM_TEXTS)
        )
        return [reply.raise_for_status().json()["choices"][0]["message"]["content"] for reply in replies]


def ask(client: openai.OpenAI) -> str | None:
    asked = [{"role": "user", "content": "Hello."}]
    return client.chat.completions.create(model=MODEL, messages=asked, max_tokens=2).choices[0].message.content

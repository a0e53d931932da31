"""Neaptide's scheduler in a real ``vllm serve``."""

import json
import re
from pathlib import Path

import openai
import pytest

from tests.vllm_plugin.server import MODEL, VllmServer, needs_plugin

# A start takes twenty seconds, and minutes on a busy machine.
pytestmark = [*needs_plugin, pytest.mark.timeout(3600)]
SETTINGS = {"neaptide": {"ttft_ms": 60000, "tpot_ms": 6000, "log_interval_s": 0.5}}
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


def ask(client: openai.OpenAI) -> str | None:
    asked = [{"role": "user", "content": "Hello."}]
    return client.chat.completions.create(model=MODEL, messages=asked, max_tokens=2).choices[0].message.content

"""A batch of two kinds of rows on the real server with the embedded model: along a plan both kinds run at once, and no
answer is another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from neaptide.engine.offline.planning.occasions import LEAST_ROWS
from neaptide.engine.record.step_log import OrderLine, StepLine, read_log
from neaptide.simulation.replay import replay
from tests.e2e.server import RunningServer, result_lines, submit_batch, wait_terminal

KIND_ROWS = LEAST_ROWS // 2 + 10
LONG_PROMPT_WORDS, LONG_ANSWER = 60, 32
KV_GIB = 0.003
"""For some dozen rows: so memory says how many run at once, not seats."""
MODEL = "tiny"
FLAGS = ("--served-model-name", MODEL, "--dtype", "float32", "--profile", "cpu-neaptide-tiny", "--batch-invariant")


def bodies() -> list[dict[str, Any]]:
    """Long prompts with short answers first, then short prompts with long answers."""
    prompts = [(f"{k} " * LONG_PROMPT_WORDS, 1) for k in range(KIND_ROWS)]
    prompts += [(f"Count from {k}:", LONG_ANSWER) for k in range(KIND_ROWS)]
    fixed = {"model": MODEL, "temperature": 0, "ignore_eos": True}
    return [{"prompt": prompt, "max_tokens": max_tokens, **fixed} for prompt, max_tokens in prompts]


def answers(directory: Path, *flags: str) -> tuple[dict[str, str], str]:
    """Texts by line, and what the server has logged. Nothing runs before the engine has all rows, and its plan if it
    gets one."""
    limits = ("--max-model-len", "512", "--kv-cache-gib", str(KV_GIB), "--shadow", "off")
    with RunningServer(directory, *FLAGS, *limits, *flags) as server:
        server.http.post("/admin/offline", json={"state": "paused"}).raise_for_status()
        batch_id = submit_batch(server, bodies(), "/v1/completions")
        server.wait_for(lambda: f"{2 * KIND_ROWS} rows given to the engine" in server.log)
        if "off" not in flags:
            server.wait_for(lambda: "the offline pool is planned" in server.log)
        server.http.post("/admin/offline", json={"state": "running"}).raise_for_status()
        batch = wait_terminal(server, batch_id)
        lines = result_lines(server, batch)
        log = server.log
    assert (batch["status"], batch["request_counts"]["failed"]) == ("completed", 0)
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}, log


def kinds_at_work(log: Path) -> list[set[bool]]:
    """Of every step, whether rows with long prompts and rows with long answers take part; handles are rows' numbers."""
    found: list[set[bool]] = []
    decoding: set[int] = set()
    for line in read_log(log):
        if isinstance(line, StepLine):
            decoding = (decoding | set(line.join)) - set(line.leave)
            found.append({handle < KIND_ROWS for handle in [*decoding, *(handle for handle, _ in line.chunks)]})
    return found


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_batch_of_two_kinds_is_planned_and_answers_are_those_of_the_unordered_run(tmp_path: Path) -> None:
    log = tmp_path / "planned.jsonl"
    planned, _ = answers(tmp_path / "planned", "--offline-plan", "on", "--step-log", str(log))
    (order, *_) = (line for line in read_log(log) if isinstance(line, OrderLine))
    assert sorted(order.rows) == list(range(2 * KIND_ROWS))
    assert order.ends  # it is followed from both
    both = [kinds == {True, False} for kinds in kinds_at_work(log)]
    assert sum(both) > len(both) / 2
    found = replay(log)
    assert found.difference is None
    assert found.steps == len(both)
    unordered_log = tmp_path / "unordered.jsonl"
    flags = ("--offline-plan", "off", "--policy", "fcfs", "--step-log", str(unordered_log))
    unordered, said = answers(tmp_path / "unordered", *flags)
    assert "the offline pool is planned" not in said
    assert sum(kinds == {True, False} for kinds in kinds_at_work(unordered_log)) <= 2 * LONG_ANSWER
    assert json.dumps(planned, sort_keys=True) == json.dumps(unordered, sort_keys=True)
    assert len(planned) == 2 * KIND_ROWS

"""Two hundred questions as a batch, with a chat every two seconds beside it."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from neaptide.loadgen.client.batches import TERMINAL
from neaptide.loadgen.client.client import StreamClient
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.percentiles import percentiles
from neaptide.loadgen.workloads.text_sets import gsm8k_prompts
from tests.e2e.server import RunningServer, get_batch, result_lines, submit_batch
from tests.real.conftest import NAME, TPOT_SLO_S, TTFT_SLO_S

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
NUM_LINES, LINE_TOKENS = 200, 48
BLOCK_TOKENS = 16
EVERY_S = 2.0
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


class Run(NamedTuple):
    lines: list[dict[str, Any]]
    """Results, in the order of the file."""
    chats: list[ChatRecord]
    seconds: float


async def chat_until(done: asyncio.Event, server: RunningServer) -> list[ChatRecord]:
    """A chat every two seconds until the batch has ended. The pause after a slow one is as long as it took: else the
    batch of a slow machine would never have its turn."""
    loop, chats = asyncio.get_running_loop(), []
    async with StreamClient(server.base_url.removesuffix("/v1"), NAME) as client:
        while not done.is_set():
            start_s = loop.time()
            chats.append(await client.chat(QUESTION, 32))
            next_s = start_s + max(EVERY_S, 2 * (loop.time() - start_s))
            with suppress(TimeoutError):
                async with asyncio.timeout_at(next_s):
                    await done.wait()
    return chats


def wait_for_lines(server: RunningServer, batch_id: str) -> dict[str, Any]:
    """The batch once it has ended. Patience is for every further line."""
    while (batch := get_batch(server, batch_id))["status"] not in TERMINAL:
        before = batch["status"], batch["request_counts"]

        def goes_on() -> bool:
            now = get_batch(server, batch_id)
            return (now["status"], now["request_counts"]) != before  # noqa: B023

        server.wait_for(goes_on)
    return batch


@pytest.fixture(scope="module")
def run(server: RunningServer) -> Run:
    asked = {"model": NAME, "temperature": 0, "max_completion_tokens": LINE_TOKENS}
    bodies = [asked | {"messages": conversation(prompt)} for prompt, _ in gsm8k_prompts()[:NUM_LINES]]

    async def both() -> Run:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        start_s = loop.time()
        chats = asyncio.create_task(chat_until(done, server))
        batch_id = await asyncio.to_thread(submit_batch, server, bodies)
        try:
            batch = await asyncio.to_thread(wait_for_lines, server, batch_id)
        finally:
            done.set()
        seconds, lines = loop.time() - start_s, result_lines(server, batch)
        lines.sort(key=lambda line: int(line["custom_id"][1:]))
        return Run(lines, await chats, seconds)

    return asyncio.run(both())


def test_every_line_is_answered_once(run: Run) -> None:
    assert [line["custom_id"] for line in run.lines] == [f"c{index}" for index in range(NUM_LINES)]
    assert {line["response"]["status_code"] for line in run.lines} == {200}
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in run.lines)


def test_the_examples_that_all_questions_share_are_computed_once(run: Run, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template(conversation(prompt), add_generation_prompt=True)["input_ids"]
        for prompt, _ in gsm8k_prompts()[:NUM_LINES]
    ]
    usages = [line["response"]["body"]["usage"] for line in run.lines]
    assert [usage["prompt_tokens"] for usage in usages] == [len(prompt) for prompt in prompts]
    shared_tokens = next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)
    shared_tokens -= shared_tokens % BLOCK_TOKENS
    assert shared_tokens > 1000
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert sum(tokens < shared_tokens for tokens in cached) == 1


def test_chats_beside_the_batch_are_answered(run: Run) -> None:
    assert [chat.error for chat in run.chats] == [None] * len(run.chats)
    assert all("Paris" in chat.text for chat in run.chats)
    assert {chat.finish_reason for chat in run.chats} == {"stop"}
    # How many are in time says something of this machine and of what else runs on it.
    met = sum(chat.met(TTFT_SLO_S, TPOT_SLO_S) for chat in run.chats)
    ttft, tpot = (percentiles([getattr(chat, name) for chat in run.chats]) for name in ("ttft_s", "tpot_s"))
    print(
        f"{NUM_LINES} lines in {run.seconds:.0f} s; {met} of {len(run.chats)} chats within both targets; "
        f"TTFT p50/p99 {ttft.p50 * 1e3:.0f}/{ttft.p99 * 1e3:.0f} ms, TPOT {tpot.p50 * 1e3:.0f}/{tpot.p99 * 1e3:.0f} ms"
    )

"""How the tokens of vLLM's own server are counted, without one."""

import asyncio

import httpx
import pytest

from benchmarks import vllm_server
from benchmarks.live.plan import ONLINE_IN
from benchmarks.vllm_server import Reading, check_answers, has_all, read, tokens_between, window_between
from neaptide.loadgen.client.recorder import ChatRecord


def chat(*token_times_s: float, num_tokens: int | None = None) -> ChatRecord:
    num_tokens = len(token_times_s) if num_tokens is None else num_tokens
    return ChatRecord(0.0, token_times_s=list(token_times_s), num_output_tokens=num_tokens)


def test_a_chat_that_goes_on_after_the_window_costs_offline_work_only_its_tokens_inside() -> None:
    slow = chat(*range(8, 40))
    window = window_between(Reading(0.0, 1000.0), Reading(10.0, 1000.0 + ONLINE_IN + 3 + 600), [slow])
    assert window.online_tokens_per_s == (ONLINE_IN + 3) / 10
    assert window.offline_tokens_per_s == 60.0


def test_chats_that_have_no_token_in_the_window_leave_all_to_offline_work() -> None:
    """A flooded server answers chats after the window, or never."""
    chats = [chat(*range(20, 52)) for _ in range(50)] + [chat()]
    window = window_between(Reading(0.0, 0.0), Reading(10.0, 4000.0), chats)
    assert (window.online_tokens_per_s, window.offline_tokens_per_s) == (0.0, 400.0)


def test_rates_are_over_the_time_between_the_answers_of_a_busy_server() -> None:
    window = window_between(Reading(100.0, 0.0), Reading(120.0, 500.0), [])
    assert (window.seconds, window.offline_tokens_per_s) == (20.0, 25.0)
    assert window.clock_s == (100.0, 120.0)


@pytest.mark.parametrize(
    ("record", "num_tokens"),
    [
        (chat(1.0, 2.0, 3.0), ONLINE_IN + 3),
        (chat(-1.0, 2.0, 3.0), 2),
        (chat(5.0, 6.0, 11.0), ONLINE_IN + 2),
        (chat(2.0, 4.0, num_tokens=8), ONLINE_IN + 8),
        (chat(2.0, 14.0, num_tokens=8), ONLINE_IN + 4),
        (chat(2.0, 4.0, num_tokens=0), ONLINE_IN + 2),
        (chat(), 0),
    ],
    ids=["whole", "begun before", "ends after", "pieces of several", "half of them", "cut off", "none"],
)
def test_tokens_of_a_chat_between_two_moments(record: ChatRecord, num_tokens: float) -> None:
    assert tokens_between(record, 0.0, 10.0) == num_tokens


def vllm(*pages: str) -> tuple[httpx.AsyncClient, list[str]]:
    """A server whose metrics are these, one after the other, and those that nobody has read."""
    left = list(pages)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=left.pop(0)))
    return httpx.AsyncClient(base_url="http://vllm", transport=transport), left


async def test_prompt_and_output_tokens_are_read() -> None:
    page = 'vllm:prompt_tokens_total{engine="0"} 300.0\nvllm:generation_tokens_total{engine="0"} 20.0\n'
    page += 'vllm:prompt_tokens_cached_total{engine="0"} 5.0\n'
    http, _ = vllm(page)
    async with http:
        assert (await read(http)).num_tokens == 320.0


async def answer(status: int) -> httpx.Response:
    return httpx.Response(status, text="unknown field priority")


async def never() -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def test_chats_wait_for_the_last_offline_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "LOOK_S", 0.0)
    http, left = vllm(*(f"vllm:num_requests_running {count}\nvllm:num_requests_waiting 1\n" for count in (0, 1, 1)))
    flood = [asyncio.create_task(line) for line in (answer(200), never(), never())]
    async with http:
        await has_all(http, flood)
    assert len(left) == 1
    for line in flood:
        line.cancel()


async def test_a_refused_offline_line_ends_the_run() -> None:
    flood = [asyncio.create_task(answer(status)) for status in (200, 400)]
    await asyncio.wait(flood)
    http, _ = vllm()
    async with http:
        with pytest.raises(SystemExit, match="refused with status 400: unknown field priority"):
            await has_all(http, flood)


async def test_lines_without_an_answer_yet_are_no_refusal() -> None:
    line = asyncio.create_task(answer(400))
    check_answers([line])
    line.cancel()

"""Runs against a server that is no Neaptide: what is sent, what is measured, what is given up."""

import asyncio
import dataclasses
import gc
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from neaptide.loadgen.client.client import closed_loop, open_loop
from neaptide.loadgen.client.recorder import ChatRecord
from neaptide.loadgen.client.wording import Counting, Wording
from neaptide.loadgen.report.summary import ratios, summary
from neaptide.loadgen.run.load import Cancelling, Shot, Target, make_shots
from neaptide.loadgen.run.runner import How, Progress, RunError, StoppedError, Users, run
from neaptide.loadgen.workloads.traces import TraceRequest
from tests.loadgen.fake_server import TEMPLATE_TOKENS, FakeServer, fake_server
from tests.patience import PATIENCE_S, until

EASY = Target(60.0, 60.0)
HARD = Target(1e-9, 1e-9)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as state:
        yield state


def shots(count: int, target: Target = EASY, **fields: Any) -> list[Shot]:
    """All due at once: prompts of 20 tokens that share the first 12, answers of 3."""
    requests = [TraceRequest(0.0, ((1, 12), (100 + k, 8)), 3) for k in range(count)]
    return [Shot(request, target, **fields) for request in requests]


async def sent(server: FakeServer, load: list[Shot], how: How) -> Progress:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        return await run(http, load, how, lambda progress: None)


# ---- prompts ----


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("can_tokenize", [True, False])
async def test_prompts_count_as_many_tokens_as_recorded(server: FakeServer, is_chat: bool, can_tokenize: bool) -> None:
    server.can_tokenize = can_tokenize
    progress = await sent(server, shots(4), How(is_chat=is_chat))
    assert {record.num_prompt_tokens for _, record in progress.records} == {20}
    assert progress.wording.exact is can_tokenize


async def test_shared_beginnings_are_the_same_words(server: FakeServer) -> None:
    await sent(server, shots(2), How())
    one, two = (body["messages"][0]["content"].split() for body in server.bodies)
    assert len(one) == 20 - TEMPLATE_TOKENS
    same = [a == b for a, b in zip(one, two, strict=True)]
    assert all(same[:13])  # a word that begins every prompt, and the twelve
    assert not all(same[13:])


def test_the_shortest_prompt_is_one_word() -> None:
    assert Wording(("a", "b"), overhead_tokens=9).text(((1, 3),)) == "the"


async def test_words_of_several_tokens_are_left_out() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        words = json.loads(request.content)["prompt"].split()
        return httpx.Response(200, json={"count": sum(2 if len(word) > 3 else 1 for word in words)})

    async with httpx.AsyncClient(base_url="http://fake", transport=httpx.MockTransport(handle)) as http:
        wording = await Counting(http, "m", is_chat=False).wording()
    assert wording.exact
    assert {len(word) for word in wording.words} == {1, 2, 3} - {1}


async def test_a_tokenizer_without_single_words_gives_the_mean() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"count": 3 * len(json.loads(request.content)["prompt"].split())})

    async with httpx.AsyncClient(base_url="http://fake", transport=httpx.MockTransport(handle)) as http:
        wording = await Counting(http, "m", is_chat=False).wording()
    assert (wording.tokens_per_word, wording.overhead_tokens, wording.exact) == (3.0, 3, False)
    assert len(wording.text(((1, 90), (2, 213))).split()) == 101


# ---- what is sent ----


async def test_fields_targets_and_lengths_reach_the_server(server: FakeServer) -> None:
    how = How(sends_targets=True, fields={"service_tier": "flex"})
    await sent(server, shots(1, Target(0.3, 0.05)), how)
    (body,) = server.bodies
    wanted = {"model": "fake", "max_completion_tokens": 3, "ignore_eos": True, "service_tier": "flex"}
    wanted |= {"ttft_slo_ms": 300.0, "tpot_slo_ms": 50.0, "stream": True}
    assert wanted.items() <= body.items()


async def test_a_natural_end_asks_for_nothing_special(server: FakeServer) -> None:
    await sent(server, shots(1), How(ignores_end=False, is_chat=False))
    assert "ignore_eos" not in server.bodies[0]
    assert server.bodies[0]["max_tokens"] == 3


async def test_a_client_that_gives_up_hangs_up(server: FakeServer) -> None:
    server.stalls.clear()
    progress = await sent(server, shots(2, cancel_after_s=0.2), How())
    assert [record.cancelled for _, record in progress.records] == [True, True]
    assert [record.error for _, record in progress.records] == [None, None]
    found = summary(progress)
    assert (found["cancelled"], found["failed"], found["attainment"]["both"]) == (2, 0, None)


async def test_what_fails_has_missed(server: FakeServer) -> None:
    server.fails_every = 2
    found = summary(await sent(server, shots(4), How()))
    assert (found["failed"], found["attainment"]["both"]) == (2, 0.5)
    assert found["errors"] == {'HTTP 503: {"error": {"message": "overloaded"}}': 2}


async def test_a_batch_beside_is_submitted_and_cancelled_at_the_end(server: FakeServer) -> None:
    line = b'{"url": "/v1/completions"}\n'
    progress = await sent(server, shots(1), How(batch=("mine.jsonl", line)))
    assert line in server.uploads[0]
    assert server.cancelled == ["/v1/batches/batch-1/cancel"]
    assert summary(progress)["batch"]["request_counts"]["completed"] == 1


@pytest.mark.parametrize("keeps_batch", [False, True])
async def test_a_run_that_is_stopped_while_its_batch_is_validated_cancels_it(
    server: FakeServer, keeps_batch: bool
) -> None:
    server.batch["status"] = "validating"
    how = How(batch=("mine.jsonl", b'{"url": "/v1/completions"}'), keeps_batch=keeps_batch)
    running = asyncio.ensure_future(sent(server, shots(1), how))
    await until(lambda: server.uploads != [] and server.asked_for_batch)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    assert server.cancelled == ([] if keeps_batch else ["/v1/batches/batch-1/cancel"])
    assert server.bodies == []


async def test_a_batch_may_be_kept(server: FakeServer) -> None:
    await sent(server, shots(1), How(batch=("mine.jsonl", b'{"url": "/v1/completions"}'), keeps_batch=True))
    assert server.cancelled == []


async def test_a_server_that_is_not_there_is_one_line() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:9") as http:
        with pytest.raises(RunError, match=r"http://127.0.0.1:9.*: ConnectError"):
            await run(http, shots(1), How(), lambda progress: None)


async def test_a_server_that_refuses_says_why(server: FakeServer) -> None:
    async with httpx.AsyncClient(base_url=server.url + "/elsewhere") as http:
        with pytest.raises(RunError, match=r"404 to /elsewhere/v1/models: .*no such page"):
            await run(http, shots(1), How(), lambda progress: None)


# ---- loops ----


async def test_times_count_from_when_a_request_was_due() -> None:
    now = asyncio.get_running_loop().time
    records: list[ChatRecord] = []

    async def late(index: int) -> ChatRecord:
        start_s = now()
        return ChatRecord(sent_s=start_s + 2.0, token_times_s=[start_s + 3.0])

    await open_loop([0.0], late, lambda index, record: records.append(record))
    (record,) = records
    assert record.late_s >= 2.0
    assert record.ttft_s == pytest.approx(record.late_s + 1.0)


@pytest.mark.parametrize("loop", ["open", "closed"])
async def test_the_heap_is_left_alone_while_requests_are_sent(loop: str) -> None:
    frozen: list[int] = []

    async def send(index: int) -> ChatRecord:
        frozen.append(gc.get_freeze_count())
        return ChatRecord(sent_s=0.0)

    before = gc.get_freeze_count()
    if loop == "open":
        await open_loop([0.0, 0.0], send, lambda index, record: None)
    else:
        await closed_loop(2, 1, 0.0, send, lambda index, record: None)
    assert min(frozen) > before
    assert gc.get_freeze_count() <= before


async def test_users_wait_for_their_answers() -> None:
    in_flight = most = 0
    order: list[int] = []

    async def send(index: int) -> ChatRecord:
        nonlocal in_flight, most
        order.append(index)
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return ChatRecord(sent_s=0.0)

    ended: list[int] = []
    await closed_loop(7, 2, 0.0, send, lambda index, record: ended.append(index))
    assert (order, sorted(ended), most) == (list(range(7)), list(range(7)), 2)


async def test_a_closed_loop_counts_from_the_sending(server: FakeServer) -> None:
    progress = await sent(server, shots(3), How(users=Users(1)))
    assert {record.late_s for _, record in progress.records} == {0.0}
    assert [record.arrival_s for _, record in progress.records] == sorted(r.arrival_s for _, r in progress.records)


# ---- targets and figures ----


def test_targets_are_drawn_by_their_shares() -> None:
    requests = [shot.request for shot in shots(2000)]
    tight, loose = Target.parse("300:50@0.8"), Target.parse("2000:200@0.2")
    made = make_shots(requests, [tight, loose], Cancelling(0.1, 5.0), seed=1)
    assert sum(shot.target == tight for shot in made) == pytest.approx(1600, rel=0.05)
    moments = [shot.cancel_after_s for shot in made if shot.cancel_after_s is not None]
    assert len(moments) == pytest.approx(200, rel=0.2)
    assert max(moments) <= 5.0
    assert made == make_shots(requests, [tight, loose], Cancelling(0.1, 5.0), seed=1)


@pytest.mark.parametrize("text", ["300", "300:", "0:50", "300:50@0", "a:b", "300:50@", "-300:50"])
def test_targets_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a target is TTFT_MS:TPOT_MS"):
        Target.parse(text)


def given(*records: tuple[Target, ChatRecord]) -> Progress:
    """A run that is over."""
    pairs = [(dataclasses.replace(shots(1)[0], target=target), record) for target, record in records]
    watch: Any = type("Watch", (), {"samples": [], "batch": None, "failures": 0, "batch_progress": []})()
    return Progress([shot for shot, _ in pairs], watch, Wording(("a",)), pairs)


def answered(first_s: float, *, arrival_s: float = 0.0) -> ChatRecord:
    """Three tokens, 0.1 s apart."""
    times = [arrival_s + first_s, arrival_s + first_s + 0.1, arrival_s + first_s + 0.2]
    return ChatRecord(arrival_s, arrival_s, None, times, times[-1], "aaa", 3, 20, "length")


def test_the_figures_by_hand() -> None:
    found = summary(given((EASY, answered(0.3)), (HARD, answered(0.5, arrival_s=1.5))))
    assert found["ttft_ms"] == {"p50": 400.0, "p90": 480.0, "p99": 498.0}
    assert found["tpot_ms"] == found["itl_ms"] == {"p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert found["longest_gap_ms"] == 100.0
    assert found["attainment"] == {"ttft": 0.5, "tpot": 0.5, "both": 0.5}
    by_target = [(row["target_ms"], row["attainment"]["both"]) for row in found["by_target"]]
    assert by_target == [("60000:60000", 1.0), ("1e-06:1e-06", 0.0)]
    assert (found["seconds"], found["output_tokens_per_s"]) == (2.2, 2.73)
    assert (found["prompt_tokens_asked_for"], found["prompt_tokens_counted"]) == (40, 40)


def test_what_the_client_was_late_by_is_in_one_of_two_figures() -> None:
    late = dataclasses.replace(answered(0.3), due_s=0.0, sent_s=0.1)
    found = summary(given((EASY, late)))
    figures = [found[name]["p50"] for name in ("ttft_ms", "late_ms", "ttft_from_sending_ms")]
    assert figures == [300.0, 100.0, 200.0]


def test_the_warm_up_is_not_counted() -> None:
    progress = given((EASY, answered(0.3)), (EASY, answered(0.5, arrival_s=1.5)))
    assert summary(progress, warm_up_s=1.0)["ttft_ms"]["p50"] == 500.0


def test_ratios_are_over_the_first() -> None:
    first, other = (summary(given((EASY, answered(first_s)))) for first_s in (0.2, 0.3))
    found = ratios(first, other)
    assert (found["ttft_p50"], found["tpot_p99"], found["offline_tokens_per_s"]) == (1.5, 1.0, None)


async def test_a_run_that_is_stopped_before_it_has_begun_sends_nothing(server: FakeServer) -> None:
    stop = asyncio.Event()
    stop.set()
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        with pytest.raises(StoppedError):
            await run(http, shots(2), How(), lambda progress: None, stop)
    assert server.bodies == []


async def test_a_run_that_is_stopped_drops_what_has_not_ended_and_cancels_its_batch(server: FakeServer) -> None:
    server.stalls.clear()
    stop = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        how = How(batch=("mine.jsonl", b'{"url": "/v1/completions"}'))
        running = asyncio.create_task(run(http, shots(2), how, lambda progress: None, stop))
        await until(lambda: len(server.bodies) == 2)
        stop.set()
        progress = await running
    assert (progress.records, progress.was_stopped) == ([], True)
    assert server.cancelled == ["/v1/batches/batch-1/cancel"]

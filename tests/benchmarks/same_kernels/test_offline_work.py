"""W1 and W2 of ``benchmarks.same_kernels``, without servers."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import pytest

from benchmarks import same_kernels_offline
from benchmarks.same_kernels_offline import FLEX, OURS, VLLM, WORKLOADS, Server, Work, order_of, ratios, tokens_per_s
from benchmarks.vllm_server import FCFS, Machine
from neaptide.loadgen.client.prometheus import Samples


def test_prompts_of_w1_share_nothing() -> None:
    prompts = WORKLOADS["W1"].prompts(64, 8192, 0)
    assert {len(prompt) for prompt in prompts} == {256}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 64


def test_prompts_of_w2_are_four_groups_in_no_order() -> None:
    prompts = WORKLOADS["W2"].prompts(64, 8192, 0)
    assert {len(prompt) for prompt in prompts} == {1088}
    groups = [tuple(prompt[:1024]) for prompt in prompts]
    assert list(Counter(groups).values()) == [16] * 4
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 64
    assert len(set(groups[:4])) > 1
    assert not set(groups) & {tuple(prompt[:1024]) for prompt in WORKLOADS["W2"].prompts(64, 8192, 1)}


def server(completion_tokens: int, asked: list[dict[str, object]]) -> httpx.AsyncClient:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append(body)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": completion_tokens}
        return httpx.Response(200, json={"usage": usage})

    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(answer))


async def test_every_prompt_is_asked_for_as_the_contender_says() -> None:
    asked: list[dict[str, object]] = []
    async with server(4, asked) as http:
        assert await tokens_per_s(http, [[7, 8], [9]], 4, {"service_tier": "flex"}) > 0
    assert [body["prompt"] for body in asked] == [[7, 8], [9]]
    assert all((body["max_tokens"], body["service_tier"]) == (4, "flex") for body in asked)


async def test_a_reply_of_another_length_counts_for_nothing() -> None:
    async with server(3, []) as http:
        with pytest.raises(SystemExit, match="asked for 2 tokens in and 4 out"):
            await tokens_per_s(http, [[7, 8]], 4, {})


def test_in_three_turns_every_contender_has_every_place_once() -> None:
    orders = [order_of(turn) for turn in range(3)]
    assert orders == [[VLLM, OURS, FLEX], [OURS, FLEX, VLLM], [FLEX, VLLM, OURS]]
    assert order_of(-1) == order_of(2)


def test_a_machine_that_slows_down_favours_no_place() -> None:
    """All three are equal, and every turn of one is a tenth slower than the turn before it."""
    rates: dict[str, list[float]] = {VLLM: [], OURS: [], FLEX: []}
    for at, name in enumerate(name for turn in range(6) for name in order_of(turn)):
        rates[name].append(1000.0 * 0.9**at)
    assert ratios(rates) == pytest.approx({OURS: 1.0, FLEX: 1.0})


def test_what_the_engine_did_in_a_turn_is_told_from_two_scrapes() -> None:
    def scraped(steps: int, tokens: int, seconds: float) -> Samples:
        series = [
            f'neaptide_step_seconds_count{{phase="total"}} {steps}',
            f'neaptide_step_seconds_sum{{phase="total"}} {seconds}',
            f'neaptide_step_seconds_sum{{phase="schedule"}} {seconds / 10}',
            f'neaptide_step_seconds_sum{{phase="model"}} {seconds / 2}',
            f'neaptide_step_tokens_total{{class="offline",phase="prefill"}} {tokens}',
            f'neaptide_step_tokens_total{{class="online",phase="decode"}} {tokens}',
        ]
        return Samples("\n".join(series) + "\n")

    assert Work.between(scraped(3, 100, 1.0), scraped(40, 350, 13.0)) == Work(37, 500, 13.2)


class Process:
    """That can be stopped, with those that it has started."""

    def __init__(self, *children: "Process") -> None:
        self._children, self._is_stopped = children, False

    def children(self, recursive: bool) -> list["Process"]:
        assert recursive
        return list(self._children)

    def suspend(self) -> None:
        self._is_stopped = True

    def resume(self) -> None:
        self._is_stopped = False

    @property
    def are_stopped(self) -> bool:
        return self._is_stopped and all(child.are_stopped for child in self._children)


def test_every_turn_asks_all_three_and_tells_what_our_engine_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our server has done a step more, of ten tokens and a quarter of a second, with every request; vLLM's has no such
    series. The other one is stopped meanwhile."""
    num_asked = {"ours": 0, "theirs": 0}
    roots = {name: Process(Process()) for name in num_asked}

    def client(name: str) -> httpx.AsyncClient:
        def answer(request: httpx.Request) -> httpx.Response:
            assert [each for each, root in roots.items() if root.are_stopped] == [
                each for each in roots if each != name
            ]
            if request.url.path == "/metrics":
                count = num_asked["ours"]
                series = [
                    f'neaptide_step_seconds_count{{phase="total"}} {count}',
                    f'neaptide_step_seconds_sum{{phase="total"}} {0.25 * count}',
                    f'neaptide_step_tokens_total{{class="offline"}} {10 * count}',
                ]
                return httpx.Response(200, text="\n".join(series) + "\n")
            num_asked[name] += 1
            body = json.loads(request.content)
            return httpx.Response(200, json={"usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 64}})

        return httpx.AsyncClient(base_url=f"http://{name}", transport=httpx.MockTransport(answer))

    async def start(*args: object) -> tuple[Server, Server]:
        return Server(client("ours"), [roots["ours"]]), Server(client("theirs"), [roots["theirs"]])  # type: ignore[list-item]

    monkeypatch.setattr(same_kernels_offline, "_start", start)
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    machine = Machine(Path("python"), 1, "bfloat16", 128, 1.0, True, "cpu", 1024)
    found = asyncio.run(same_kernels_offline.measure("W1", tmp_path, machine, FCFS, count=2, repeats=3, seed=0))
    assert not any(root.are_stopped for root in roots.values())
    assert num_asked == {"ours": 2 * 2 * 4, "theirs": 2 * 4}
    assert {name: len(rates) for name, rates in found["total_tokens_per_s"].items()} == {VLLM: 3, OURS: 3, FLEX: 3}
    assert found["engine"] == {name: 3 * [{"steps": 2, "tokens": 20, "step_s": 0.5}] for name in (OURS, FLEX)}
    assert set(found["bars"]) == {OURS, FLEX}
    same_kernels_offline.print_result(found)
    assert "of vLLM's, mean of turns" in capsys.readouterr().out

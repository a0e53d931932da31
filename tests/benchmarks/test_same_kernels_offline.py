"""W1 and W2 of ``benchmarks.same_kernels``, without servers."""

import json
from collections import Counter

import httpx
import pytest

from benchmarks.same_kernels_offline import WORKLOADS, tokens_per_s


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

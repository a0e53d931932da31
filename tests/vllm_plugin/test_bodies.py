"""Batch lines that run by their bodies: what stands for their prompts."""

from typing import Any

import pytest

from neaptide_vllm.batches.bodies import BodyCompiler, prompt_of

COMPILER = BodyCompiler(("tiny",))
CHAT = "/v1/chat/completions"


def prompt(body: dict[str, Any], endpoint: str = CHAT) -> list[int]:
    (found,) = COMPILER.compile(endpoint, body).prompts
    return found


def chat(*contents: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


def test_prompts_that_begin_alike_have_tokens_that_begin_alike() -> None:
    one, other = prompt(chat("x" * 400 + "one")), prompt(chat("x" * 400 + "other"))
    shared = sum(a == b for a, b in zip(one, other, strict=False))
    assert shared >= 100
    assert one != other


def test_every_number_is_a_token_id() -> None:
    assert all(0 <= token < 1 << 31 for token in prompt_of("\U0010ffff\xff" * 100))


def test_tools_are_a_part_of_the_prompt() -> None:
    assert prompt(chat("a") | {"tools": [{"type": "function"}]}) != prompt(chat("a"))


def test_sampling_is_no_part_of_the_prompt() -> None:
    assert prompt(chat("a") | {"temperature": 1}) == prompt(chat("a"))


def test_an_image_has_as_many_tokens_whatever_its_size() -> None:
    def image(data: str) -> list[Any]:
        return [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]

    small, large = prompt(chat(image("A"))), prompt(chat(image("A" * 100_000)))
    assert len(small) == len(large)
    assert small != large


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ({"max_output_tokens": 9}, 9),
        ({}, 256),
        ({"max_tokens": 5, "n": 3}, 15),
        ({"max_tokens": "five", "n": True}, 256),
        ({"max_tokens": -1}, 256),
    ],
)
def test_the_limit_of_the_answers_is_read_where_it_can_be(body: dict[str, Any], limit: int) -> None:
    assert [params.max_tokens for params in COMPILER.compile(CHAT, body).params] == [limit]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/completions", {"prompt": [1, 2, 3]}), ("/v1/responses", {"input": "hello", "instructions": "be kind"})],
)
def test_each_endpoint_has_its_own_prompt(endpoint: str, body: dict[str, Any]) -> None:
    assert prompt(body, endpoint) != prompt({}, endpoint)

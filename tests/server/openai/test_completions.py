"""Legacy completions: token ids, echo, scores."""

import asyncio
import json
from typing import Any

import pytest

from neaptide.server.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL_ID, Server


async def test_text_prompt(server: Server) -> None:
    server.engine.script = server.context.tokenizer.encode(" is four")
    reply = await server.openai.completions.create(model=MODEL_ID, prompt="two and two")
    assert reply.object == "text_completion"
    assert reply.choices[0].text == " is four"
    assert reply.choices[0].finish_reason == "stop"
    assert server.engine.requests[0].prompt_token_ids == server.context.tokenizer.encode("two and two")
    assert server.engine.requests[0].params.max_tokens == 16


async def test_many_prompts_times_n_keep_their_order(server: Server) -> None:
    reply = await server.openai.completions.create(model=MODEL_ID, prompt=[[10, 11], [12]], n=2, seed=5, max_tokens=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    prompts = [request.prompt_token_ids for request in server.engine.requests]
    assert prompts == [[10, 11], [10, 11], [12], [12]]
    assert [request.params.seed for request in server.engine.requests] == [5, 6, 5, 6]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 12)


async def test_scoring_a_prompt_as_lm_eval_does(server: Server, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("caf\u00e9 au lait")
    reply = await server.openai.completions.create(
        model=MODEL_ID, prompt=[prompt], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    found = reply.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    lengths = {len(found.tokens), len(found.token_logprobs), len(found.top_logprobs), len(found.text_offset)}
    assert lengths == {len(prompt) + 1}
    first_values: tuple[Any, Any] = (found.token_logprobs[0], found.top_logprobs[0])
    assert first_values == (None, None)
    pairs = zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)
    assert all(value == max(top.values()) for value, top in pairs)
    assert reply.choices[0].text.startswith("caf\u00e9 au lait")
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert reply.choices[0].text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
async def test_scored_tokens_are_those_of_the_text(server: Server, stream: bool) -> None:
    server.engine.script = server.context.tokenizer.encode("one two END three")
    body = {"prompt": "count", "logprobs": 1, "stop": ["END"], "max_tokens": 30, "stream": stream}
    reply = await server.http.post("/v1/completions", json=body)
    if stream:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
    else:
        choices = reply.json()["choices"]
    scored = [choice for choice in choices if choice["logprobs"]["tokens"]]
    assert "".join(token for choice in scored for token in choice["logprobs"]["tokens"]) == "one two "
    assert "".join(choice["text"] for choice in choices) == "one two "
    assert all(choice["text"] for choice in scored)


async def test_zero_tokens_score_the_prompt_alone(server: Server) -> None:
    reply = await server.openai.completions.create(
        model=MODEL_ID, prompt="spell cat", echo=True, logprobs=0, max_tokens=0
    )
    choice = reply.choices[0]
    assert choice.text == "spell cat"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == len(server.engine.requests[0].prompt_token_ids)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0


async def test_stream_equals_the_whole_reply(server: Server) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL_ID,
        "prompt": "a",
        "seed": 1,
        "max_tokens": 30,
        "echo": True,
        "logprobs": 2,
    }
    whole = await server.openai.completions.create(**arguments)
    stream = await server.openai.completions.create(**arguments, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    joined: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in chunks:
        if chunk.choices[0].logprobs:
            for name, values in joined.items():
                values += getattr(chunk.choices[0].logprobs, name)
    for name, values in joined.items():
        assert values == getattr(whole.choices[0].logprobs, name)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_special_text_in_a_raw_prompt_is_parsed(server: Server) -> None:
    await server.openai.completions.create(model=MODEL_ID, prompt="<|user|>hi<|end|>", max_tokens=1)
    ids = server.engine.requests[0].prompt_token_ids
    assert (ids[0], ids[-1]) == (3, 5)


async def test_requests_run_side_by_side(server: Server) -> None:
    server.engine.delay_s = 0.001
    calls = [server.openai.completions.create(model=MODEL_ID, prompt=f"p {i}", seed=i, max_tokens=8) for i in range(20)]
    replies = await asyncio.gather(*calls)
    assert len({reply.choices[0].text for reply in replies}) == 20


async def test_token_ids_come_back_when_asked_for(server: Server) -> None:
    server.engine.script = [10, 11, 12]
    reply = await server.openai.completions.create(
        model=MODEL_ID, prompt="hi", max_tokens=5, extra_body={"return_token_ids": True}
    )
    assert reply.choices[0].model_dump()["token_ids"] == [10, 11, 12]


async def test_prompts_may_do_without_the_tokens_that_a_tokenizer_adds(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def encode(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return [7]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    for more in ({}, {"add_special_tokens": False}):
        await server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **more})
    assert asked == [True, False]

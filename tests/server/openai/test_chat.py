"""Chat completions through the real client."""

from typing import Any

import pytest

from neaptide.engine.params import FinishReason, Tier
from tests.server.conftest import MODEL_ID, USER, Server


async def _stream(server: Server, **arguments: Any) -> list[Any]:
    stream = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, stream=True, **arguments)
    return [chunk async for chunk in stream]


async def test_reply_has_the_shape_of_the_api(server: Server) -> None:
    server.engine.script = server.context.tokenizer.encode("Four.")
    server.engine.cached_tokens = 3
    reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER)
    choice = reply.choices[0]
    assert choice.message.content == "Four."
    assert choice.finish_reason == "stop"
    assert reply.object == "chat.completion"
    assert reply.id.startswith("chatcmpl-")
    assert reply.service_tier == "default"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(server.engine.requests[0].prompt_token_ids)
    assert reply.usage.completion_tokens == len(server.engine.script)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    metrics = reply.model_dump()["metrics"]
    assert metrics["time_to_first_token_ms"] > 0
    assert metrics["queue_time_ms"] == pytest.approx(1.0, abs=0.01)


async def test_length_ends_at_max_tokens_and_first_name_wins(server: Server) -> None:
    reply = await server.openai.chat.completions.create(
        model=MODEL_ID, messages=USER, max_completion_tokens=3, max_tokens=9
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


async def test_max_tokens_defaults_to_the_rest_of_the_context(server: Server) -> None:
    server.engine.script = [20]
    await server.openai.chat.completions.create(model=MODEL_ID, messages=USER)
    request = server.engine.requests[0]
    assert request.params.max_tokens == 8192 - len(request.prompt_token_ids)


async def test_stream_equals_the_whole_reply(server: Server) -> None:
    whole = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, seed=7, max_tokens=40)
    chunks = await _stream(server, seed=7, max_tokens=40)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].choices[0].delta.content is None
    assert len({chunk.id for chunk in chunks}) == 1


async def test_usage_comes_in_a_chunk_of_its_own(server: Server) -> None:
    chunks = await _stream(server, max_tokens=4, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].model_dump()["metrics"]["generation_time_ms"] >= 0


async def test_continuous_usage_counts_up(server: Server) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await _stream(server, max_tokens=4, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_seeded_choices_differ_and_repeat(server: Server) -> None:
    replies = [
        await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, n=3, seed=11, max_tokens=20)
        for _ in range(2)
    ]
    first, second = ([choice.message.content for choice in reply.choices] for reply in replies)
    assert first == second
    assert len(set(first)) == 3
    assert [request.params.seed for request in server.engine.requests[:3]] == [11, 12, 13]
    usage = replies[0].usage
    assert usage is not None
    assert usage.completion_tokens == 60
    assert usage.prompt_tokens == len(server.engine.requests[0].prompt_token_ids)


async def test_streamed_choices_interleave(server: Server) -> None:
    chunks = await _stream(server, n=2, seed=3, max_tokens=10)
    indices = [chunk.choices[0].index for chunk in chunks]
    assert indices != sorted(indices)
    whole = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, n=2, seed=3, max_tokens=10)
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[index].message.content
        assert [c.finish_reason for c in mine][-1] == "length"


async def test_logprobs_have_tokens_bytes_and_tops(server: Server) -> None:
    server.engine.script = server.context.tokenizer.encode("é!")
    reply = await server.openai.chat.completions.create(
        model=MODEL_ID, messages=USER, logprobs=True, top_logprobs=2, max_tokens=10
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "é!"
    # The two bytes of é are no text of their own.
    assert content[0].token == "bytes:\\xc3"
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)


@pytest.mark.parametrize("include", [False, True])
async def test_scored_tokens_are_those_of_the_text(server: Server, include: bool) -> None:
    """A stop string is cut off, and so are its tokens; the streamed ones too."""
    server.engine.script = server.context.tokenizer.encode("one two END three")
    fields: dict[str, Any] = {"logprobs": True, "stop": ["END"], "max_tokens": 30}
    extra = {"include_stop_str_in_output": include}
    whole = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, **fields, extra_body=extra)
    (choice,) = whole.choices
    assert choice.message.content == ("one two END" if include else "one two ")
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    chunks = await _stream(server, **fields, extra_body=extra)
    scored = [c.choices[0] for c in chunks if c.choices[0].logprobs]
    assert "".join(choice.delta.content for choice in scored) == whole.choices[0].message.content
    assert "".join(e.token for c in scored for e in c.logprobs.content) == whole.choices[0].message.content
    assert all(c.delta.content for c in scored)


async def test_stream_carries_logprobs_of_every_token(server: Server) -> None:
    chunks = await _stream(server, logprobs=True, max_tokens=6)
    entries = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert len(entries) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_over_tokens_ends_and_aborts(server: Server, stream: bool) -> None:
    server.engine.script = server.context.tokenizer.encode("one two three four") + [20] * 500
    if stream:
        chunks = await _stream(server, stop=["o thr"])
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        last = chunks[-1].choices[0]
    else:
        reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, stop=["o thr"])
        text, last = reply.choices[0].message.content or "", reply.choices[0]
    assert text == "one tw"
    assert last.finish_reason == "stop"
    assert last.model_dump()["stop_reason"] == "o thr"
    assert server.engine.aborts[0] == (server.engine.requests[0].request_id, FinishReason.STOP)
    assert server.engine.num_running == 0


async def test_stop_string_can_be_kept(server: Server) -> None:
    server.engine.script = server.context.tokenizer.encode("one two three")
    reply = await server.openai.chat.completions.create(
        model=MODEL_ID, messages=USER, stop="two", extra_body={"include_stop_str_in_output": True}
    )
    assert reply.choices[0].message.content == "one two"


async def test_one_choice_may_stop_while_others_go_on(server: Server) -> None:
    letters = {0: "a", 1: "b"}
    ids = {k: server.context.tokenizer.encode(text)[0] for k, text in letters.items()}
    server.engine.token_at = lambda prompt, seed, position: ids[(seed or 0) % 2]
    reply = await server.openai.chat.completions.create(
        model=MODEL_ID, messages=USER, n=2, seed=0, stop=["aaa"], max_tokens=6
    )
    assert [choice.message.content for choice in reply.choices] == ["", "bbbbbb"]
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "length"]


@pytest.mark.parametrize(
    ("asked", "tier", "told"),
    [
        (None, Tier.DEFAULT, "default"),
        ("auto", Tier.DEFAULT, "default"),
        ("default", Tier.DEFAULT, "default"),
        ("scale", Tier.DEFAULT, "default"),
        ("priority", Tier.PRIORITY, "priority"),
        ("fast", Tier.PRIORITY, "priority"),
        ("flex", Tier.FLEX, "flex"),
    ],
)
async def test_service_tier(server: Server, asked: Any, tier: Tier, told: str) -> None:
    reply = await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, service_tier=asked, max_tokens=2)
    assert server.engine.requests[0].tier is tier
    assert reply.service_tier == told


async def test_targets_come_from_the_body_or_the_server(server: Server) -> None:
    body: Any = {"ttft_slo_ms": 250, "tpot_slo_ms": 12.5}
    await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, max_tokens=1, extra_body=body)
    await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, max_tokens=1)
    first, second = server.engine.requests
    assert (first.ttft_slo_s, first.tpot_slo_s) == (0.25, 0.0125)
    assert (second.ttft_slo_s, second.tpot_slo_s) == (30.0, 30.0)


async def test_content_parts_null_fields_and_unknown_fields_are_fine(server: Server) -> None:
    body = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}], "name": None}],
        "temperature": None,
        "stop": None,
        "logprobs": None,
        "seed": None,
        "service_tier": None,
        "stream_options": None,
        "user": 5,
        "no_such_field": {"a": 1},
        "max_tokens": 1,
    }
    reply = await server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200
    await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, max_tokens=1)
    first, second = server.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_max_tokens_is_clamped_to_the_context(server: Server) -> None:
    server.engine.script = [20]
    await server.openai.chat.completions.create(model=MODEL_ID, messages=USER, max_tokens=100_000)
    request = server.engine.requests[0]
    assert len(request.prompt_token_ids) + request.params.max_tokens == 8192

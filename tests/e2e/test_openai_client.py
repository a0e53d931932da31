"""The real ``openai`` client over sockets, on the embedded model: what its users rely on, endpoint by endpoint."""

from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from neaptide.launch.serve import embedded_model_path
from tests.e2e.conftest import KEYS
from tests.e2e.server import RunningServer

MODEL = "neaptide/tiny"
QUESTION: list[Any] = [{"role": "user", "content": "What is 21 + 34?"}]


def reference_text() -> str:
    """What the checkpoint answers through ``transformers``."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=64, do_sample=False)
    return str(tokenizer.decode(out[0][ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_chat_answers_what_the_reference_answers(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=64)
    assert reply.choices[0].message.content == reference_text()
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_stream_carries_the_same_text_and_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_async_client(embedded: RunningServer, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    async with openai.AsyncOpenAI(base_url=embedded.base_url, api_key=KEYS[0], max_retries=0) as asynchronous:
        reply = await asynchronous.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == whole.choices[0].message.content


def test_flex_says_that_it_was_flex(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, service_tier="flex")
    assert reply.service_tier == "flex"


def test_token_ids_with_echo_and_logprobs_score_the_prompt(client: openai.OpenAI) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)["input_ids"]
    reply = client.completions.create(model=MODEL, prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    for position in range(1, len(ids)):
        assert logprobs.token_logprobs[position] == pytest.approx(
            float(expected[position - 1, ids[position]]), abs=2e-3
        )


def test_end_of_text_after_an_echoed_prompt_is_scored(client: openai.OpenAI) -> None:
    """A client that scores a prompt leaves out the last entry, whatever was generated."""
    prompt = "<|bos|><|user|>What is 21 + 34?<|end|><|assistant|>1+4=5, 2+3=5 so 55"
    reply = client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == prompt
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.tokens[-2:] == ["5", "<|end|>"]
    assert len(logprobs.tokens) == len(logprobs.token_logprobs)


# ---- chat ------------------------------------------------------------------------------------------------


def test_choices_of_one_seed_differ_and_repeat(client: openai.OpenAI) -> None:
    replies = [
        client.completions.create(model=MODEL, prompt="a", n=3, seed=5, temperature=2, max_tokens=12) for _ in range(2)
    ]
    first, second = ([choice.text for choice in reply.choices] for reply in replies)
    assert first == second
    assert len(set(first)) > 1


def test_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0).choices[0].message.content
    assert whole
    stop = whole[-3:]
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=[stop])
    assert reply.choices[0].message.content == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_greedy_tokens_are_the_best_of_their_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3, max_completion_tokens=4
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == reply.choices[0].message.content
    for entry in content:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_content_may_come_in_parts(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    whole, reply = (
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0) for messages in (QUESTION, parts)
    )
    assert reply.choices[0].message.content == whole.choices[0].message.content


def test_long_answers_end_at_the_limit_with_length(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=5, extra_body={"ignore_eos": True, "unknown_field": [None]}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5


def test_whole_and_streamed_replies_name_the_same_system(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    chunks = list(client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, stream=True))
    assert (whole.system_fingerprint or "").startswith("fp_")
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_stream_helper_of_the_sdk(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_a_stream_may_be_left_early(embedded: RunningServer, client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    embedded.wait_for(lambda: embedded.http.get("/load").json() == {"server_load": 0})


def test_tools_that_the_model_does_not_call_leave_a_plain_answer(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, tools=tools)
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"


# ---- completions -----------------------------------------------------------------------------------------


def test_texts_and_token_ids_give_the_same_completion(client: openai.OpenAI) -> None:
    ids = AutoTokenizer.from_pretrained(embedded_model_path())("one two three").input_ids
    text, tokens = (
        client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=6)
        for prompt in ("one two three", [ids])
    )
    assert text.choices[0].text == tokens.choices[0].text


def test_many_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = ["2+2=", "3+3=", "4+4="]
    together = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=3)
    alone = [client.completions.create(model=MODEL, prompt=p, temperature=0, max_tokens=3) for p in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [reply.choices[0].text for reply in alone]


def test_completion_stream_carries_the_same_text_and_usage(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="one two", temperature=0, max_tokens=8)
    stream = client.completions.create(
        model=MODEL,
        prompt="one two",
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_zero_tokens_score_the_prompt_alone(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="one two", echo=True, logprobs=1, max_tokens=0)
    assert reply.choices[0].text == "one two"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0


# ---- models, tokens, probes ------------------------------------------------------------------------------


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object) == (MODEL, "model")
    assert model.model_dump()["max_model_len"] == 2048


def test_a_model_id_with_a_slash_can_be_retrieved(client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == MODEL


def test_tokenize_and_detokenize_are_inverse(embedded: RunningServer) -> None:
    tokens = embedded.http.post("/tokenize", json={"prompt": "caf\u00e9 2+2"}).json()["tokens"]
    assert embedded.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "caf\u00e9 2+2"}


def test_tokenize_counts_a_conversation_as_chat_does(embedded: RunningServer, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert reply.usage is not None
    counted = embedded.http.post("/tokenize", json={"messages": QUESTION}).json()["count"]
    assert counted == reply.usage.prompt_tokens


def test_tokenizer_info_names_the_end_of_text(embedded: RunningServer) -> None:
    assert embedded.http.get("/tokenizer_info").json()["eos_token"] == "<|end|>"


@pytest.mark.parametrize("path", ["/health", "/ready", "/livez", "/readyz", "/metrics", "/version"])
def test_probes_answer_get_and_head(embedded: RunningServer, path: str) -> None:
    assert embedded.http.get(path).status_code == 200
    assert embedded.http.head(path).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/no-such-path"])
def test_no_reply_names_the_software_that_sends_it(embedded: RunningServer, path: str) -> None:
    assert "server" not in embedded.http.get(path).headers


def test_replies_carry_the_callers_request_id_and_the_time_taken(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.parse()._request_id == "mine-1"
    assert int(raw.headers["openai-processing-ms"]) >= 0


# ---- errors ----------------------------------------------------------------------------------------------


def test_a_bad_value_is_a_bad_request_that_names_the_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9)
    assert (refused.value.param, refused.value.code) == ("temperature", "invalid_value")
    assert refused.value.request_id


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=QUESTION, stream=True)
    assert unknown.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_is_told_by_its_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=[7] * 2048)
    assert refused.value.code == "context_length_exceeded"


def test_an_endpoint_that_is_not_offered_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model=MODEL, input="x")
    assert unknown.value.code == "unknown_url"

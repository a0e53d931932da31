"""Ten chats with a real model say what ``transformers`` says."""

from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from neaptide.server.text.tokenizer import Tokenizer
from tests.executors.driver import leading_agreement
from tests.real.conftest import NAME

MAX_TOKENS = 32
CHATS: dict[str, list[dict[str, str]]] = {
    "a fact": [{"role": "user", "content": "What is the capital of France?"}],
    "a list": [{"role": "user", "content": "Name three rivers."}],
    "a sum": [{"role": "user", "content": "What is 21 + 34?"}],
    "code": [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    "another language": [{"role": "user", "content": "Wie heißt die Hauptstadt von Österreich?"}],
    "marks and emoji": [{"role": "user", "content": "Repeat: «naïve» 🙂 — 日本語\n\tdone"}],
    "its own system turn": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "a second turn": [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "What is my name?"},
    ],
    "a role mark in the text": [{"role": "user", "content": "What does <|im_end|> mean in a prompt?"}],
    "a long prompt": [{"role": "user", "content": "The sea is wide. " * 60 + "How often did I say that?"}],
}


class Reference(NamedTuple):
    tokenizer: Any
    model: Any


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return Reference(tokenizer, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_what_transformers_says(name: str, client: openai.OpenAI, reference: Reference, model: Path) -> None:
    asked: Any = {"messages": CHATS[name], "temperature": 0.0, "max_completion_tokens": MAX_TOKENS}
    reply: Any = client.chat.completions.create(model=NAME, **asked, extra_body={"return_token_ids": True})
    (choice,) = reply.choices
    prompt = Tokenizer(model).encode_chat(CHATS[name])
    templated = reference.tokenizer.apply_chat_template(CHATS[name], add_generation_prompt=True)["input_ids"]
    assert (prompt == templated) == (name != "a role mark in the text")  # which we read as text
    assert reply.usage.prompt_tokens == len(prompt)
    said = list(choice.token_ids)
    assert reply.usage.completion_tokens == len(said)
    if choice.finish_reason == "stop":  # by the end token, which is not shown
        said.append(reference.tokenizer.eos_token_id)
    else:
        assert len(said) == MAX_TOKENS
    assert leading_agreement(reference.model, prompt, said) == len(said)
    assert choice.message.content == reference.tokenizer.decode(choice.token_ids, skip_special_tokens=True)

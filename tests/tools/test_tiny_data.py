"""What neaptide-tiny is trained on: the same tokens as the server's, and nothing that is held out."""

import json
import random

import pytest
from tokenizers import Tokenizer

from neaptide.data import skills, structured_skills
from neaptide.data.skills import is_held_out
from neaptide.launch.serve import embedded_model_path
from neaptide.server.parsers.calls import Offer
from neaptide.server.parsers.core import OutputParser
from neaptide.server.parsers.formats import HERMES
from neaptide.server.text.chat_template import ChatTemplate, TemplateInput
from tools.tiny_data import BOS, CHAT_TEMPLATE, END, Chats, Packer, build_tokenizer

ROUNDS = 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


def rendered(messages: list[dict[str, object]], tools: list[dict[str, object]] | None) -> str:
    return ChatTemplate(CHAT_TEMPLATE, {}).render(TemplateInput(messages=messages, tools=tools))


def test_the_template_offers_functions_as_they_were_trained() -> None:
    rng = random.Random(0)
    for skill in [*structured_skills.TOOL_SKILLS] * ROUNDS:
        messages = structured_skills.single(skill, rng).messages
        tools = [tool.definition() for tool in structured_skills.offered(messages)]
        texts = [f"<|{message['role']}|>{message['content']}<|end|>" for message in messages]
        assert rendered([*messages[1:]], tools) == "".join(["<|bos|>", *texts, "<|assistant|>"])


def test_the_template_writes_calls_as_they_were_trained() -> None:
    arguments = [{"city": "paris"}, {"city": "rome"}]
    calls = [{"function": {"name": "get_time", "arguments": each}} for each in arguments]
    texts = [structured_skills.call_text("get_time", each) for each in arguments]
    text = rendered([{"role": "assistant", "content": "", "tool_calls": calls}], None)
    assert text == f"<|bos|><|assistant|>{texts[0]}\n{texts[1]}<|end|><|assistant|>"


def test_functions_without_parameters_are_offered_as_well() -> None:
    schemas = [None, {}, {"type": "object", "properties": {}}]
    tools = [{"function": {"name": "f"}}, *({"function": {"name": "f", "parameters": schema}} for schema in schemas)]
    assert rendered([], tools) == "<|bos|><|system|>Tools:\nf()\nf()\nf()\nf()<|end|><|assistant|>"


def test_a_conversation_without_functions_is_as_it_always_was(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Notes: 1 cat"}, {"role": "user", "content": "What is note 1?"}]
    text = rendered([*messages], None)
    assert text == "<|bos|><|system|>Notes: 1 cat<|end|><|user|>What is note 1?<|end|><|assistant|>"
    shipped = Tokenizer.from_file(str(embedded_model_path() / "tokenizer.json"))
    assert tokenizer.encode(text).ids == shipped.encode(text).ids


def test_the_server_reads_the_calls(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(ROUNDS):
        example = structured_skills.single("call", rng)
        names = frozenset(tool.name for tool in structured_skills.offered(example.messages))
        parser = OutputParser(None, HERMES, Offer(names))
        assert parser.push(example.answer).content + parser.finish().content == ""
        (call,) = parser.calls
        assert structured_skills.call_text(call.name, json.loads(call.arguments)) == example.answer


@pytest.mark.parametrize("skill", structured_skills.STRUCTURED)
def test_a_chat_marks_its_answer_and_nothing_else(tokenizer: Tokenizer, skill: str) -> None:
    chats = Chats(tokenizer, random.Random(2))
    chats.weights = {skill: 1.0}
    for _ in range(ROUNDS):
        state = chats.rng.getstate()
        chat = chats.single()
        chats.rng.setstate(state)
        chats.rng.choices([0], [1.0])  # as the skill is drawn
        example = structured_skills.single(skill, chats.rng)
        marked = [token for token, mark in zip(chat.tokens, chat.answer, strict=True) if mark]
        assert marked == [*tokenizer.encode(example.answer).ids, END]
        assert (chat.skills, chat.tokens[0], chat.answer[0]) == ([skill], BOS, 0)


def test_long_chats_ask_about_what_they_began_with(tokenizer: Tokenizer) -> None:
    chats = Chats(tokenizer, random.Random(3))
    chats.weights = {"call": 1.0, "result": 1.0, "recall": 1.0, "untooled": 1.0}
    seen = set()
    for _ in range(4 * ROUNDS):
        chat = chats.turns(300)
        kinds = frozenset(chat.skills)
        assert len(chat.tokens) <= 300
        assert kinds <= {"recall", "recite", "untooled"} or kinds <= {"call", "result"}
        seen.add(kinds)
    assert {frozenset({"call", "result"}), frozenset({"untooled"})} <= seen


def test_batches_are_numbered_by_answer(tokenizer: Tokenizer) -> None:
    batch = Packer(Chats(tokenizer, random.Random(4))).batch(6, 320, True)
    assert sorted({*batch.answer.ravel()}) == [*range(len(batch.skills) + 1)]
    ends = batch.targets[(batch.answer > 0) & (batch.targets == END)]
    assert len(ends) == len(batch.skills)


def test_json_holds_out_what_its_skills_hold_out() -> None:
    rng = random.Random(5)
    words = []
    for held_out in (False, True):
        for _ in range(40 * ROUNDS):
            question = structured_skills.single("json", rng, held_out).messages[-1]["content"]
            if question.startswith("How long is the word "):
                word = question.removeprefix("How long is the word ").removesuffix("? Answer in JSON.")
                assert is_held_out("length", word) == held_out
                words.append(held_out)
    assert {*words} == {False, True}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1+4=5, 2+3=5 so 55", '{"working": "1+4=5, 2+3=5", "answer": 55}'),
        ("b0 a1 so 1", '{"working": "b0 a1", "answer": 1}'),
        ("c-a-t", '{"answer": "c-a-t"}'),
    ],
)
def test_answers_in_json(answer: str, expected: str) -> None:
    assert structured_skills.json_answer(answer) == expected


def test_every_skill_can_be_asked_with_examples() -> None:
    rng = random.Random(6)
    for skill in structured_skills.ALL:
        example = structured_skills.few_shot(skill, rng, 3)
        answered = [m["content"] for m in example.messages if m["role"] == "assistant"]
        assert len(answered) == (7 if skill == "result" else 3)
        assert not skills.is_correct(example, answered[0] + "x")

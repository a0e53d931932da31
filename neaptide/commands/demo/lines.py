"""The demo's batch file: questions with known answers, and the cost of a line."""

import json
import random
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from neaptide.data import skills
from neaptide.launch.serve import embedded_model_path

MODEL = "demo"
"""Name that the served model has here, whichever it is."""
MAX_TOKENS = 320
"""More than the longest right answer has: a countdown from 99."""
SHOTS = 6
PREFIX_SKILLS = ("add", "subtract", "compare", "upper", "reverse", "spell")
MARKS = 2
"""Special tokens around each message."""


def make_batch(lines: int, seed: int) -> list[skills.Example]:
    """Questions of every skill; every other line follows a few-shot prefix that its skill shares."""
    rng = random.Random(seed)
    examples = []
    for index in range(lines):
        names = PREFIX_SKILLS if index % 2 else skills.SKILLS
        example = skills.single(names[index // 2 % len(names)], rng, held_out=True)
        if index % 2:
            prefix = skills.shared_prefix(example.skill, SHOTS)
            example = skills.Example(example.skill, [*prefix, *example.messages], example.answer)
        examples.append(example)
    return examples


def computed_texts(example: skills.Example) -> list[str]:
    """The texts of a line that are computed if the prefixes are cached: its own messages and the answer."""
    is_few_shot = any(message["role"] == "assistant" for message in example.messages)
    own = example.messages[-1:] if is_few_shot else example.messages
    return [*(message["content"] for message in own), example.answer]


def line_tokens(examples: Sequence[skills.Example], answer_tokens: int | None = None) -> list[int]:
    """Tokens of each line that the engine must compute, by the embedded model's tokenizer.

    ``answer_tokens`` is the length of every answer of a model that was not taught them. Its other tokens are a rough
    estimate.
    """
    tokenizer = Tokenizer.from_file(str(embedded_model_path() / "tokenizer.json"))
    counts = []
    for example in examples:
        encoded = tokenizer.encode_batch(computed_texts(example), add_special_tokens=False)
        tokens = [len(one.ids) + MARKS for one in encoded]
        counts.append(sum(tokens) if answer_tokens is None else sum(tokens[:-1]) + answer_tokens)
    return counts


def batch_jsonl(examples: Sequence[skills.Example], max_tokens: int = MAX_TOKENS) -> bytes:
    lines = []
    for index, example in enumerate(examples):
        body = {"model": MODEL, "messages": example.messages, "temperature": 0}
        body["max_completion_tokens"] = max_tokens
        line = {"custom_id": f"line-{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    return ("\n".join(lines) + "\n").encode()


def answers_of(results: bytes) -> dict[str, str]:
    """The answers of the result lines that succeeded, by custom id."""
    answers = {}
    for line in map(json.loads, results.splitlines()):
        if line["response"] is not None and line["response"]["status_code"] == 200:
            answers[line["custom_id"]] = line["response"]["body"]["choices"][0]["message"]["content"]
    return answers


def right_answers(examples: Sequence[skills.Example], answers: Mapping[str, str]) -> int:
    """Number of answers that are exactly right."""
    return sum(skills.is_correct(e, answers.get(f"line-{i}", "")) for i, e in enumerate(examples))

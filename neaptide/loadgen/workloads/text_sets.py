"""Offline sets with texts: builds their prompts and splits them into blocks that show what they share.

A token is 4 characters and a block 64 characters, unless a tokenizer is given. Then tokens are its tokens, and a block
has 16.
"""

import ast
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from neaptide.loadgen.workloads.trace_formats import CHARS_PER_TOKEN, TEXT_BLOCK_TOKENS, format_of
from neaptide.loadgen.workloads.trace_rows import Row as Cells
from neaptide.loadgen.workloads.trace_rows import trace_rows
from neaptide.loadgen.workloads.traces import (
    Row,
    Segments,
    TraceRequest,
    data_file,
    numbered_jsonl,
    read_jsonl,
)

Tokenize = Callable[[str], Sequence[int]]
Prompt = str | tuple[int, ...]
"""A text, or token ids."""

MMLU_SHOTS = 5
GSM8K_SHOTS = 8
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
OPENAI_DEFAULT_OUTPUT_TOKENS = 256
"""Output of a batch line without a maximum."""


def mmlu(base: int, limit: int | None) -> list[TraceRequest]:
    """Five-shot questions whose answer is one token."""
    prompts = mmlu_prompts()[:limit]
    return text_requests(base, prompts, [1] * len(prompts))


def mmlu_prompts() -> list[str]:
    """Five-shot multiple-choice prompts, with one prefix of examples per subject."""
    heads: dict[str, list[str]] = defaultdict(list)
    prompts: list[str] = []
    for row in read_jsonl(data_file("offline", "mmlu.jsonl.gz")):
        subject = row["subject"]
        options = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
        question = f"{row['question']}{options}\nAnswer:"
        if row["part"] == "test":
            intro = f"Multiple-choice questions on {subject}, with answers."
            prompts.append("\n\n".join([intro, *heads[subject], question]))
        elif len(heads[subject]) < MMLU_SHOTS:
            heads[subject].append(f"{question} {'ABCD'[row['answer']]}")
    return prompts


def bbh(base: int, limit: int | None) -> list[TraceRequest]:
    """Three-shot chain-of-thought prompts. The outputs are the bare answers, mostly one token, so this is
    prefill work."""
    rows = read_jsonl(data_file("offline", "bbh.jsonl.gz"))[:limit]
    heads = json.loads(data_file("offline", "bbh_cot_prompts.json").read_text(encoding="utf-8"))
    prompts = [f"{heads[row['task']]}\n\nQ: {row['input']}\nA: Let's think step by step." for row in rows]
    return text_requests(base, prompts, [_tokens(row["target"]) for row in rows])


def gsm8k(base: int, limit: int | None) -> list[TraceRequest]:
    asked = gsm8k_prompts()[:limit]
    return text_requests(base, [prompt for prompt, _ in asked], [_tokens(answer) for _, answer in asked])


def gsm8k_prompts() -> list[tuple[str, str]]:
    """Eight-shot arithmetic prompts with answers; the first eight rows are the examples of all others."""
    rows = read_jsonl(data_file("offline", "gsm8k.jsonl.gz"))
    shots = "".join(f"Q: {row['question']}\nA: {row['answer']}\n\n" for row in rows[:GSM8K_SHOTS])
    return [(f"{shots}Q: {row['question']}\nA:", row["answer"]) for row in rows[GSM8K_SHOTS:]]


def loogle_wiki_qa(base: int, limit: int | None) -> list[TraceRequest]:
    """Many questions on each of five long articles."""
    asked = [
        (f"{article}\n\nQuestion: {question}\nAnswer:", _tokens(answer))
        for article, pairs in loogle_articles()
        for question, answer in pairs
    ][:limit]
    return text_requests(base, [prompt for prompt, _ in asked], [tokens for _, tokens in asked])


def loogle_articles() -> list[tuple[str, list[tuple[str, str]]]]:
    """The articles of the LooGLE file, each with its question-answer pairs."""
    rows = read_jsonl(data_file("offline", "loogle_wiki_qa.jsonl.gz"))
    # the source stores the pairs as a Python literal in a string
    return [(row["input"], [(p["Q"], str(p["A"])) for p in ast.literal_eval(row["qa_pairs"])]) for row in rows]


def is_openai_batch(path: Path) -> bool:
    """Whether the file is an OpenAI batch, by its first line; otherwise it is a trace. Raises ValueError like
    ``trace_rows``."""
    first = next(trace_rows(path), None)
    return first is not None and first.is_json and format_of(first) is None


def openai_batch(base: int, path: Path, limit: int | None, tokenize: Tokenize | None) -> list[TraceRequest]:
    """The lines of an OpenAI batch file. The output length is the line's own maximum, which a model may not reach.

    Raises ValueError for an empty file and, with the line's number, for a line without messages, prompt or input text.
    """
    lines = numbered_jsonl(path)
    if not lines:
        raise ValueError(f"{path.name} has no requests")
    prompts: list[Prompt] = []
    outputs = []
    for number, line in lines[:limit]:
        try:
            body = line["body"]
            prompts.append(_body_prompt(body))
        except KeyError as error:
            raise ValueError(f"{path.name}, line {number}: not a request: {error} is missing") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{path.name}, line {number}: not a request: a field has the wrong type") from error
        if not prompts[-1]:
            raise ValueError(f"{path.name}, line {number}: not a request: the prompt is empty")
        fields = Cells(path.name, number, body)
        limit_name = next(filter(fields.has, LIMITS), None)
        outputs.append(OPENAI_DEFAULT_OUTPUT_TOKENS if limit_name is None else fields.length(limit_name))
    return text_requests(base, prompts, outputs, tokenize)


def text_requests(
    base: int, prompts: Sequence[Prompt], output_tokens: Sequence[int], tokenize: Tokenize | None = None
) -> list[TraceRequest]:
    """Requests of real prompts: those with equal beginnings have equal first segments, in whole blocks."""
    ids: dict[tuple[int, object], int] = {}
    sizes, chains = [], []
    for prompt in prompts:
        size, blocks = _blocks(prompt, tokenize)
        sizes.append(size)
        chain, before = [], -1
        for block in blocks:
            before = ids.setdefault((before, block), len(ids))
            chain.append(before)
        chains.append(chain)
    return [
        TraceRequest(0.0, segments, max(1, tokens))
        for segments, tokens in zip(_joined(base, chains, sizes), output_tokens, strict=True)
    ]


def _blocks(prompt: Prompt, tokenize: Tokenize | None) -> tuple[int, Iterable[object]]:
    """The prompt's tokens, and its blocks."""
    if isinstance(prompt, str):
        if tokenize is None:
            chars = TEXT_BLOCK_TOKENS * CHARS_PER_TOKEN
            # a few characters may be less than a token
            return max(1, _tokens(prompt)), (prompt[at : at + chars] for at in range(0, len(prompt), chars))
        prompt = tuple(tokenize(prompt))
    tokens = prompt
    return len(tokens), (tokens[at : at + TEXT_BLOCK_TOKENS] for at in range(0, len(tokens), TEXT_BLOCK_TOKENS))


def _joined(base: int, chains: list[list[int]], input_tokens: list[int]) -> list[Segments]:
    """Segments of chained blocks. Blocks that always occur together are one segment, named by the first block.

    A block's id stands for all text up to its end. So the next block belongs to the same segment if exactly as many
    prompts have it.
    """
    uses = Counter(block for chain in chains for block in chain)
    rows = []
    for chain, total in zip(chains, input_tokens, strict=True):
        starts = [k for k, block in enumerate(chain) if k == 0 or uses[block] != uses[chain[k - 1]]]
        ends = [TEXT_BLOCK_TOKENS * start for start in starts[1:]] + [total]
        # remaining characters at the end may be less than a token
        rows.append(
            tuple(
                (base + chain[start], end - TEXT_BLOCK_TOKENS * start)
                for start, end in zip(starts, ends, strict=True)
                if end > TEXT_BLOCK_TOKENS * start
            )
        )
    return rows


def _tokens(text: str) -> int:
    return len(text) // CHARS_PER_TOKEN


def _body_prompt(body: Row) -> Prompt:
    if "messages" in body:
        return "".join(f"{message['role']}: {_content_text(message['content'])}\n" for message in body["messages"])
    if "prompt" not in body and "input" not in body:
        raise KeyError("messages, prompt or input")
    content = body["prompt"] if "prompt" in body else body["input"]
    ids = _token_ids(content)
    return _content_text(content) if ids is None else ids


def _token_ids(content: Any) -> tuple[int, ...] | None:
    """The token ids of a prompt, or of several, one after the other; None if it is text."""
    if not isinstance(content, list):
        return None
    if content and all(isinstance(part, list) for part in content):
        content = [token for part in content for token in part]
    if not any(type(token) is int for token in content):
        return None
    if not all(type(token) is int and token >= 0 for token in content):
        raise TypeError("token ids")
    return tuple(content)


def _content_text(content: Any) -> str:
    """A content string, or the text parts of a content list."""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.get("text", "") for part in content)
